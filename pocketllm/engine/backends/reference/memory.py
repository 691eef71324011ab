"""What outlasts a step, in plain torch: weights, caches and states, how they are made and what is copied in them."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import Int32Array
from pocketllm.engine.backends.reference.attention import PagedCache
from pocketllm.engine.backends.reference.compressed import CompressedCache
from pocketllm.engine.backends.reference.latent import LatentCache
from pocketllm.engine.backends.reference.recurrent import StateSlots, copy_slots, new_slots
from pocketllm.engine.weights import quant

ELEMENTS_AT_ONCE = 1 << 20
"""Values decoded in one go at load: what loading takes beside the weights themselves."""


class MemoryOps:
    """Operations that are not of a step: at load, and where blocks or states go on as copies."""

    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Tensor:
        """Decode a matrix to float32 once, a slice of rows at a time."""
        out, width = shape
        elements, num_bytes = quant.block_size(quant_type)
        rows = data.reshape(out, width // elements * num_bytes)
        matrix = torch.empty(shape)
        view = matrix.numpy()
        step = max(1, ELEMENTS_AT_ONCE // width)
        for at in range(0, out, step):
            part = rows[at : at + step]
            view[at : at + step] = quant.dequantize(part, quant_type, (len(part), width))
        return matrix

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> Tensor:
        experts, out, width = shape
        return self.load_matrix(data, quant_type, (experts * out, width)).view(shape)

    def load_vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """A copy: the file may be closed or changed later."""
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def new_kv_cache(
        self,
        num_layers: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        in_windows: bool = False,
    ) -> PagedCache:
        """Zeros, which the operating system hands out page by page as they are written."""
        shape = (num_blocks, block_size, num_kv_heads)
        return PagedCache(
            keys=[untouched_zeros(*shape, key_dim) for _ in range(num_layers)],
            values=[untouched_zeros(*shape, value_dim) for _ in range(num_layers)],
            in_windows=in_windows,
        )

    def new_states(
        self, num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int
    ) -> StateSlots:
        return new_slots(num_layers, conv, delta, num_slots)

    def new_latent_cache(self, num_layers: int, dim: int, num_blocks: int, block_size: int) -> LatentCache:
        return LatentCache([untouched_zeros(num_blocks, block_size, 1, dim) for _ in range(num_layers)])

    def new_compressed_cache(
        self, num_layers: int, dim: int, ratio: int, num_blocks: int, block_size: int
    ) -> CompressedCache:
        shape = (num_blocks, -(-block_size // ratio), 1, dim)
        return CompressedCache([untouched_zeros(*shape) for _ in range(num_layers)], block_size, ratio)

    def copy_blocks(
        self, cache: PagedCache | LatentCache | CompressedCache, sources: Int32Array, targets: Int32Array
    ) -> None:
        layers = [*cache.keys, *cache.values] if isinstance(cache, PagedCache) else cache.rows
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for kept in layers:
                kept[target] = kept[source]

    def copy_states(self, states: StateSlots, sources: Int32Array, targets: Int32Array) -> None:
        copy_slots(states, sources.tolist(), targets.tolist())


def untouched_zeros(*shape: int) -> Tensor:
    """Zeros that take no memory until they are written: torch.zeros writes every page, numpy asks for fresh ones."""
    return torch.from_numpy(np.zeros(shape, np.float32))
