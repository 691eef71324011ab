"""Checkpoints of real shapes without a file: random blocks with sane scales, made when they are asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.quant_types import BY_NAME

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_S": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,), "Q2_0": (0,), "PQ2_0": (0,), "PTQ1_0": (26,),
}  # fmt: skip
"""Bytes of a block where a float16 lies."""


@dataclass(frozen=True)
class TensorInfo:
    """What a family asks of a tensor."""

    name: str
    quant_type: str
    shape: tuple[int, ...]


class Synthetic:
    """A llama checkpoint; types: of the token table, most matrices, v and down where Q4_K_M spends more, the head.

    experts: how many, and how many a token uses, of `inner` each: then it is a qwen3moe one.
    """

    def __init__(
        self, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
        types: tuple[str, str, str], scale: float = 0.002, experts: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        most, more, head = types
        family = "llama" if experts is None else "qwen3moe"
        self._scale = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        self._random = np.random.default_rng(0)
        self._pools: dict[str, npt.NDArray[np.uint8]] = {}
        self._experts: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.uint8]] = {}
        keys: dict[str, Any] = {
            "block_count": layers, "context_length": 8192, "embedding_length": hidden, "feed_forward_length": inner,
            "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
            "attention.value_length": head_dim, "rope.dimension_count": head_dim, "rope.freq_base": 500000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        if experts is not None:
            keys |= {"expert_count": experts[0], "expert_used_count": experts[1], "expert_feed_forward_length": inner}
        self.metadata: Mapping[str, Any] = {
            "general.architecture": family, **{f"{family}.{key}": value for key, value in keys.items()}
        }  # fmt: skip
        self.tensors: dict[str, TensorInfo] = {}
        self._add("token_embd.weight", most, vocab, hidden)
        self._add("output.weight", head, vocab, hidden)
        self._add("output_norm.weight", "F32", hidden)
        for layer in range(layers):
            block = f"blk.{layer}."
            is_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
            self._add(f"{block}attn_norm.weight", "F32", hidden)
            self._add(f"{block}ffn_norm.weight", "F32", hidden)
            self._add(f"{block}attn_q.weight", most, heads * head_dim, hidden)
            self._add(f"{block}attn_k.weight", most, kv_heads * head_dim, hidden)
            self._add(f"{block}attn_v.weight", more if is_more else most, kv_heads * head_dim, hidden)
            self._add(f"{block}attn_output.weight", most, hidden, heads * head_dim)
            suffix, several = "", ()
            if experts is not None:
                suffix, several = "_exps", experts[:1]
                self._add(f"{block}ffn_gate_inp.weight", "F32", experts[0], hidden)
                self._add(f"{block}attn_q_norm.weight", "F32", head_dim)
                self._add(f"{block}attn_k_norm.weight", "F32", head_dim)
            self._add(f"{block}ffn_gate{suffix}.weight", most, *several, inner, hidden)
            self._add(f"{block}ffn_up{suffix}.weight", most, *several, inner, hidden)
            self._add(f"{block}ffn_down{suffix}.weight", more if is_more else most, *several, hidden, inner)

    def _add(self, name: str, quant_type: str, *shape: int) -> None:
        self.tensors[name] = TensorInfo(name, quant_type, shape)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        return np.ones(self.tensors[name].shape, np.float32)

    def router(self, name: str) -> npt.NDArray[np.uint8]:
        """Numbers that tell experts apart, the same whenever they are asked for."""
        random, shape = np.random.default_rng(len(name) + sum(name.encode())), self.tensors[name].shape
        return (random.standard_normal(shape).astype(np.float32) / 16).view(np.uint8).reshape(-1)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Blocks from a pool of 65536, again and again from another place; experts of a type are the same in layers."""
        info = self.tensors[name]
        if info.quant_type == "F32":
            return self.router(name)
        key = info.quant_type, info.shape
        if len(info.shape) < 3:
            return self._blocks(info)
        if key not in self._experts:
            self._experts[key] = self._blocks(info)
        return self._experts[key]

    def _blocks(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        kind = BY_NAME[info.quant_type]
        count = prod(info.shape) // kind.block_elements
        if info.quant_type not in self._pools:
            pool = self._random.integers(0, 256, (1 << 16, kind.block_bytes), dtype=np.uint8)
            for at in HALVES[info.quant_type]:
                pool[:, at : at + 2] = self._scale
            self._pools[info.quant_type] = pool
        pool = self._pools[info.quant_type]
        first = int(self._random.integers(0, len(pool)))
        return np.resize(np.roll(pool, first, 0), (count, kind.block_bytes)).reshape(-1)
