"""A paged cache of rows that all heads share, and attention over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import LatentAttentionSpec
from pocketllm.engine.backends.cuda.attention import ROTATIONS, Heads
from pocketllm.engine.backends.cuda.layers.latent.kernels import attention as kernels
from pocketllm.engine.backends.cuda.steps.batch import TILE_QUERIES, DeviceBatch

SPLIT, MOST_SPLITS = (128, 256), (128, 64)
"""Keys in a split at least, and splits at most: of a single row, and of several; part of the numerics version."""
TILE, WIDE_TILE = 32, 16
"""Cached rows that are multiplied at once, and of those in float32, for which shared memory is too small; part of the
numerics version."""
LINES = 16
"""Heads, or heads of some tokens, that a program has: rows of an instruction of the tensor cores."""
STAGES, WARPS = 2, 4
MERGED_AT_ONCE, MERGED_VALUES = 16, 128


@dataclass
class LatentCache:
    """rows: one tensor a layer, [blocks, block_size, dim]."""

    rows: Sequence[Tensor]

    @property
    def block_size(self) -> int:
        return int(self.rows[0].shape[1])


@dataclass(frozen=True)
class Selected:
    """Which cached rows each token of a step attends: slots of a cache, the first `counts` of each."""

    slots: Tensor
    """int32 [tokens, most]"""
    counts: Tensor
    """int32 [tokens]"""


def store(rows: Tensor, slots: Tensor, first: Heads, second: Heads | None) -> None:
    """Write a step's rows at their slots; second: what lies behind the first part."""
    other = first if second is None else second
    _, weight, first_angles, eps, num_freq = first.arguments()
    angles = first_angles
    if second is not None and second.angles is not None:
        _, _, angles, _, num_freq = second.arguments()
    key = 0 if second is None else second.head_dim
    assert first.head_dim + key == rows.shape[-1], (first.head_dim, key, rows.shape)
    kernels.store_kernel[(len(first.x),)](
        first.x, weight, other.x, angles, rows, slots, first.x.stride(0), other.x.stride(0), eps, num_freq,
        WIDTH=first.head_dim, W_BLOCK=triton.next_power_of_2(first.head_dim), KEY=key,
        K_BLOCK=triton.next_power_of_2(max(key, 1)), HAS_NORM=first.norm is not None,
        FIRST_ROTATION=ROTATIONS[first.layout], ROTATION=ROTATIONS[other.layout], num_warps=2,
    )  # fmt: skip


def attend(
    q_latent: Tensor, q_rope: Heads, rows: Tensor, batch: DeviceBatch, spec: LatentAttentionSpec,
    selected: Selected | None, are_few: bool, is_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Each sequence's new tokens over its own cached rows: [tokens, heads · rank], float32.

    is_invariant: whether splits must not depend on how many sequences there are.
    """
    out = torch.empty(len(q_latent), spec.num_heads * spec.rank, dtype=torch.float32, device=q_latent.device)
    launch = Launch(q_latent, q_rope, rows, spec, out, is_invariant)
    if selected is not None:
        most = selected.slots.shape[1]
        launch.singles(selected.slots, selected.counts, None, len(out), most, are_few)
        return out
    if len(batch.single_seqs):
        places = batch.single_seqs, batch.single_tokens
        launch.singles(batch.block_table, batch.seq_lens, places, len(places[0]), batch.max_length, True)
    if len(batch.tile_seqs):
        launch.tiles(batch)
    return out


class Launch:
    """One layer's attention."""

    def __init__(
        self, q_latent: Tensor, q_rope: Heads, rows: Tensor, spec: LatentAttentionSpec, out: Tensor, is_invariant: bool
    ) -> None:
        x, _, angles, _, num_freq = q_rope.arguments()
        self._q = q_latent, x, angles, rows
        self._strides = q_latent.stride(0), x.stride(0)
        self._spec, self._out, self._num_freq, self._is_invariant = spec, out, num_freq, is_invariant
        self._heads = min(LINES, triton.next_power_of_2(spec.num_heads))
        self._groups = -(-spec.num_heads // self._heads)
        is_wide = rows.element_size() > 2
        self._constants: dict[str, Any] = {
            "RANK": spec.rank, "R_BLOCK": max(16, triton.next_power_of_2(spec.rank)), "ROPE": spec.rope_dim,
            "P_BLOCK": max(16, triton.next_power_of_2(spec.rope_dim)), "BLOCK": rows.shape[1],
            "TILE": WIDE_TILE if is_wide else TILE, "STAGES": 1 if is_wide else STAGES,
            "ROTATION": ROTATIONS[q_rope.layout], "PRECISION": "tf32x3" if is_wide else "tf32", "num_warps": WARPS,
        }  # fmt: skip

    def singles(
        self, table: Tensor, lengths: Tensor, places: tuple[Tensor, Tensor] | None, count: int, longest: int,
        in_splits: bool,
    ) -> None:  # fmt: skip
        """Single tokens: of sequences at places, or all of a step over the slots in `table`."""
        spec, out, has_selection = self._spec, self._out, places is None
        seqs, tokens = (lengths, lengths) if places is None else places
        kind = 0 if count == 1 and not self._is_invariant else 1
        least, most = SPLIT[kind], MOST_SPLITS[kind]
        if not in_splits:
            least = triton.next_power_of_2(longest)
        splits = min(most, -(-longest // least))
        shape = (count, spec.num_heads, splits)
        parts = marks = out
        if splits > 1:
            parts = torch.empty(*shape, spec.rank, dtype=torch.float32, device=out.device)
            marks = torch.empty(*shape, 2, dtype=torch.float32, device=out.device)
        kernels.latent_kernel[(self._groups, splits, count)](
            *self._q, table, lengths, lengths, seqs, tokens, parts, marks, out, *self._strides, table.stride(0),
            spec.num_heads, self._groups, splits, least, most, self._num_freq, spec.scale,
            HEADS=LINES, QUERIES=1, ARE_SINGLE=True, HAS_SELECTION=has_selection, **self._constants,
        )  # fmt: skip
        if splits > 1:
            chunk = min(MERGED_VALUES, triton.next_power_of_2(spec.rank))
            kernels.merge_kernel[(-(-spec.rank // chunk), spec.num_heads, count)](
                parts, marks, lengths, seqs, tokens, out, spec.num_heads, splits, least, most,
                RANK=spec.rank, CHUNK=chunk, AT_ONCE=MERGED_AT_ONCE, HAS_SELECTION=has_selection, num_warps=4,
            )  # fmt: skip

    def tiles(self, batch: DeviceBatch) -> None:
        """Sequences with more tokens: some tokens with some heads at a time."""
        queries = LINES // self._heads
        kernels.latent_kernel[(self._groups * (TILE_QUERIES // queries), 1, len(batch.tile_seqs))](
            *self._q, batch.block_table, batch.seq_lens, batch.query_start_loc, batch.tile_seqs, batch.tile_firsts,
            self._out, self._out, self._out, *self._strides, batch.block_table.stride(0), self._spec.num_heads,
            self._groups, 1, 1, 1, self._num_freq, self._spec.scale,
            HEADS=self._heads, QUERIES=queries, ARE_SINGLE=False, HAS_SELECTION=False, **self._constants,
        )  # fmt: skip
