"""The reference backend over keys and values of eight bits: what a GPU's cache of them is compared with."""

from typing import Any

import torch

from pocketllm.engine.backends.reference.ops import ReferenceOps

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}


def kept_as(kv_dtype: str, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of heads [..., dim] as torch rounds them."""
    largest = heads.abs().amax(-1, keepdim=True)
    by = torch.where(largest > 1e-30, LARGEST[kv_dtype] / largest, 0.0)
    numbers = (heads * by).round().to(torch.int8) if kv_dtype == "int8" else (heads * by).to(torch.float8_e4m3fn)
    return numbers, largest / LARGEST[kv_dtype]


class Rounding(ReferenceOps):
    """The reference backend over keys and values that were rounded on their way into the cache."""

    def __init__(self, kv_dtype: str) -> None:
        super().__init__()
        self.kv_dtype = kv_dtype

    def store_kv(self, cache: Any, layer: int, k: Any, v: Any, batch: Any) -> None:
        if self.kv_dtype in LARGEST:
            k, v = (self.rounded(x, cache.keys[layer].shape[2]) for x in (k, v))
        super().store_kv(cache, layer, k, v, batch)

    def rounded(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        numbers, scales = kept_as(self.kv_dtype, x.view(len(x), num_heads, -1))
        return (numbers.float() * scales).view(x.shape)
