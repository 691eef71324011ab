"""Paged keys and values in GPU memory, and attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.api.ops import Norm, RopeLayout
from pocketllm.engine.backends.cuda.batch import TILE_QUERIES, DeviceBatch
from pocketllm.engine.backends.cuda.kernels import attention as kernels
from pocketllm.engine.backends.cuda.kernels.heads import heads_kernel, store_kernel

SPLIT = 64
"""Keys in one split of a decode step; part of the numerics version."""
TILE_KEYS = 64
MERGED_AT_ONCE = 16
ROTATIONS = {None: 0, RopeLayout.ADJACENT: 1, RopeLayout.HALF_SPLIT: 2}


@dataclass
class PagedCache:
    """keys and values: one tensor a layer, [blocks, block_size, heads, dim]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


@dataclass(frozen=True)
class Heads:
    """Heads that are normed and rotated where they are read: [tokens, heads · head_dim]."""

    x: Tensor
    head_dim: int
    norm: Norm | None = None
    angles: Tensor | None = None
    layout: RopeLayout | None = None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, float, int]:
        """What a kernel takes: heads, weight, angles, eps, frequencies."""
        weight, eps = (self.x, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        if self.angles is None:
            return self.x, weight, self.x, eps, 1
        return self.x, weight, self.angles, eps, self.angles.shape[-1]

    def constants(self) -> dict[str, int | bool]:
        """What a kernel is compiled for."""
        return {
            "DIM": self.head_dim,
            "BLOCK": triton.next_power_of_2(self.head_dim),
            "HAS_NORM": self.norm is not None,
            "ROTATION": ROTATIONS[self.layout],
        }

    def written(self) -> Tensor:
        """The same as plain rows."""
        x, weight, angles, eps, num_freq = self.arguments()
        tokens, heads = len(x), x.shape[1] // self.head_dim
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        heads_kernel[(tokens, heads)](
            x, weight, angles, out, x.stride(0), heads, eps, num_freq, **self.constants(), num_warps=1
        )
        return out


def store(k: Heads, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write a step's keys and values at their slots."""
    x, weight, angles, eps, num_freq = k.arguments()
    heads, v_dim = keys.shape[2], values.shape[3]
    store_kernel[(len(x), heads)](
        x, v, weight, angles, keys, values, slots, x.stride(0), v.stride(0), heads, eps, num_freq,
        V_DIM=v_dim, V_BLOCK=triton.next_power_of_2(v_dim), **k.constants(), num_warps=1,
    )  # fmt: skip


def attend(
    q: Heads, keys: Tensor, values: Tensor, batch: DeviceBatch, spec: AttentionSpec, as_bytes: bool, in_fragments: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence's new tokens over its own cached ones: [tokens, heads · v_dim], float32.

    Beside it the same as int8 in words of four and its scales, in the form of `rows.write_rows`; not written unless
    as_bytes, which takes a step in which every sequence has one token.
    """
    x, weight, angles, eps, num_freq = q.arguments()
    block, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group = spec.num_heads // kv_heads
    out = torch.empty(len(x), spec.num_heads * v_dim, dtype=torch.float32, device=x.device)
    width = out.shape[1]
    eights = -(-len(x) // 8) * 8
    out_bytes = torch.empty(eights * width // 4 if as_bytes else 1, dtype=torch.int32, device=x.device)
    out_scales = torch.empty(eights * width // 32 if as_bytes else 1, dtype=torch.float32, device=x.device)
    shape = q.constants()
    head_block = shape.pop("BLOCK")
    limits = (spec.scale, spec.softcap or 0.0, spec.window or 0)
    constants = {
        **shape, "D_BLOCK": head_block, "GROUP": group, "V_DIM": v_dim, "V_BLOCK": triton.next_power_of_2(v_dim),
        "BLOCK": block, "HAS_SOFTCAP": spec.softcap is not None, "HAS_WINDOW": spec.window is not None,
    }  # fmt: skip
    singles, tiles = len(batch.single_seqs), len(batch.tile_seqs)
    if singles:
        splits = -(-batch.max_length // SPLIT)
        parts = torch.empty(singles, spec.num_heads, splits, v_dim, dtype=torch.float32, device=x.device)
        marks = torch.empty(singles, spec.num_heads, splits, 2, dtype=torch.float32, device=x.device)
        kernels.split_kernel[(singles, kv_heads, splits)](
            x, weight, angles, keys, values, batch.block_table, batch.seq_lens, batch.single_seqs, batch.single_tokens,
            parts, marks, x.stride(0), batch.block_table.stride(0), kv_heads, splits, eps, num_freq, *limits,
            ROWS=max(16, triton.next_power_of_2(group)), SPLIT=SPLIT, TILE=TILE_KEYS, **constants, num_warps=4,
        )  # fmt: skip
        kernels.merge_kernel[(singles, spec.num_heads)](
            parts, marks, batch.seq_lens, batch.single_seqs, batch.single_tokens, out, out_bytes, out_scales,
            spec.num_heads, splits,
            spec.window or 0, V_DIM=v_dim, V_BLOCK=triton.next_power_of_2(v_dim), SPLIT=SPLIT, AT_ONCE=MERGED_AT_ONCE,
            HAS_WINDOW=spec.window is not None, HAS_BYTES=as_bytes, IN_FRAGMENTS=in_fragments, num_warps=4,
        )  # fmt: skip
    if tiles:
        kernels.tiles_kernel[(tiles, spec.num_heads)](
            x, weight, angles, keys, values, batch.block_table, batch.seq_lens, batch.query_start_loc,
            batch.tile_seqs, batch.tile_firsts, out, x.stride(0), batch.block_table.stride(0), spec.num_heads, kv_heads,
            eps, num_freq, *limits, QUERIES=TILE_QUERIES, TILE=TILE_KEYS, **constants, num_warps=4,
        )  # fmt: skip
    return out, out_bytes, out_scales
