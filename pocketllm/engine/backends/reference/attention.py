"""Paged causal attention in plain torch, one sequence at a time.

The sums over keys are taken in tiles of TILE keys, first tile first, and keys past the end weigh zero: so a query's
result is the same to the bit however its prompt was chunked, and whatever other sequences the step holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, Int32Array, Int64Array
from pocketllm.engine.backends.reference.rows import pad_rows

TILE = 256
"""Keys in one partial sum; part of the numerics version."""


@dataclass
class PagedCache:
    """keys and values: one tensor a layer, [blocks, block_size, heads, dim], zeros at first."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    in_windows: bool = False
    """Whether a batch's window_table and window_slots are of its blocks."""

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]


@dataclass(frozen=True)
class SequencePlan:
    """What attention needs of one sequence in a step, made once and used by every layer."""

    first: int
    last: int
    """Its tokens in the flat batch: [first, last)."""
    length: int
    """Cached tokens after this step."""
    blocks: Tensor
    """Its cache blocks in order, then any block as often as it takes to fill the last tile."""
    ahead: Tensor
    """How many tokens a key comes after a query, negative before it, [queries, 1, keys]: padded to whole tiles."""

    def hidden(self, window: int | None) -> Tensor:
        """True where a query may not look: ahead of it, or further back than its window."""
        return self.ahead > 0 if window is None else (self.ahead > 0) | (self.ahead <= -window)


@dataclass(frozen=True)
class StepPlan:
    """A batch, as tensors."""

    batch: ForwardBatch
    slots: Tensor
    sequences: Sequence[SequencePlan]
    windows: "StepPlan | None"
    """The same for caches in windows; None where the batch has nothing for them."""


def plan_step(batch: ForwardBatch, block_size: int) -> StepPlan:
    """Turn a batch's numpy into the tensors that its layers share."""
    windows = None
    if len(batch.window_slots):
        windows = StepPlan(batch, *plan_blocks(batch, batch.window_table, batch.window_slots, block_size), None)
    return StepPlan(batch, *plan_blocks(batch, batch.block_table, batch.slot_mapping, block_size), windows)


def plan_blocks(
    batch: ForwardBatch, table: Int32Array, slots: Int64Array, block_size: int
) -> tuple[Tensor, list[SequencePlan]]:
    """A step's slots, and its sequences, by a block table."""
    sequences = []
    for row in range(batch.num_seqs):
        first, last = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
        length = int(batch.seq_lens[row])
        num_keys = -(-length // TILE) * TILE
        ahead = np.arange(num_keys, dtype=np.int32) - batch.positions[first:last, None, None]
        blocks = np.zeros(-(-num_keys // block_size), np.int64)
        num_own = -(-length // block_size)
        blocks[:num_own] = table[row, :num_own]
        sequences.append(SequencePlan(first, last, length, torch.from_numpy(blocks), torch.from_numpy(ahead)))
    return torch.from_numpy(slots), sequences


def gather(cache: Tensor, plan: SequencePlan) -> Tensor:
    """One sequence's keys or values of one layer: [heads, keys in whole tiles, dim]; past its length, anything."""
    _, _, heads, dim = cache.shape
    return cache.index_select(0, plan.blocks).view(-1, heads, dim)[: plan.ahead.shape[-1]].transpose(0, 1)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q · kᵀ · scale) · v over the keys that are not hidden, in tiles.

    q: [queries, heads * dim]; keys, values: [kv_heads, keys, dim]; query heads g, g+1, … share a key head.
    sinks: [heads] a score more for each softmax, which has no value.
    """
    queries = q.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    by_head = q.view(queries, spec.num_kv_heads, group, spec.head_dim).transpose(0, 1)
    by_head = pad_rows(by_head.reshape(spec.num_kv_heads, queries * group, spec.head_dim))
    scores = torch.bmm(by_head, keys.transpose(1, 2)).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    seen = scores[:, : queries * group].view(spec.num_kv_heads, queries, group, -1)
    seen.masked_fill_(hidden, -torch.inf)
    top = scores.amax(-1)
    sunk = torch.full_like(top, -torch.inf)
    if sinks is not None:
        own = sinks.view(spec.num_kv_heads, 1, group).expand(-1, queries, -1)
        sunk[:, : queries * group] = own.reshape(spec.num_kv_heads, -1)
        top = torch.maximum(top, sunk)
    scores = scores.sub_(top[..., None]).exp_()
    dim = values.shape[-1]
    total = sunk.sub_(top).exp_()
    mixed = scores.new_zeros(*scores.shape[:2], dim)
    for at in range(0, scores.shape[-1], TILE):
        tile = scores[..., at : at + TILE]
        total += tile.sum(-1)
        mixed = torch.baddbmm(mixed, tile, values[:, at : at + TILE])
    mixed /= total[..., None]
    out = mixed[:, : queries * group].view(spec.num_kv_heads, queries, group, dim)
    return out.transpose(0, 1).reshape(queries, spec.num_heads * dim)


def paged_attention(
    q: Tensor, cache: PagedCache, layer: int, step: StepPlan, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """`attend` for each sequence's queries over its own blocks: [tokens, heads * dim]."""
    parts = []
    for plan in step.sequences:
        keys, values = gather(cache.keys[layer], plan), gather(cache.values[layer], plan)
        # weighed with zero below, which would not quiet an infinity left by another
        values[:, plan.length :] = 0.0
        if spec.window is not None:
            values[:, : max(1 - int(plan.ahead[0, 0, 0]) - spec.window, 0)] = 0.0
        parts.append(attend(q[plan.first : plan.last], keys, values, plan.hidden(spec.window), spec, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
