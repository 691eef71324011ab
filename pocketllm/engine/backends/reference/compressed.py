"""Layers that compress groups of tokens, in plain torch: a query and an entry at a time.

The arithmetic of each has a shape that only its position tells: so its bits are the same however a prompt was chunked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.compressed import Compressor, LimitedExperts, SoftConnection, WindowSpec
from pocketllm.engine.backends.reference import streams as residual
from pocketllm.engine.backends.reference.attention import TILE, StepPlan, attend
from pocketllm.engine.backends.reference.recurrent import segments
from pocketllm.engine.backends.reference.rows import pad_rows, product


@dataclass
class CompressedCache:
    """rows: one tensor a layer, [blocks, entries that may end in a block, 1, dim], zeros at first."""

    rows: Sequence[Tensor]
    block_size: int
    ratio: int

    def places(self, blocks: Tensor, first: int, last: int) -> Tensor:
        """Where entries [first, last) of a sequence lie in a layer's flat rows: in the block of their last token."""
        ends = torch.arange(first + 1, last + 1) * self.ratio - 1
        inside = torch.div(ends % self.block_size, self.ratio, rounding_mode="floor")
        return blocks[torch.div(ends, self.block_size, rounding_mode="floor")] * self.rows[0].shape[1] + inside

    def entries(self, layer: int, blocks: Tensor, count: int) -> Tensor:
        """A sequence's first entries: [count, dim]."""
        rows = self.rows[layer]
        return rows.view(-1, rows.shape[-1])[self.places(blocks, 0, count)]


def blocks_of(batch: ForwardBatch) -> Tensor:
    """The block table, to be indexed with: [sequences, blocks]."""
    return torch.from_numpy(batch.block_table.astype(np.int64))


def turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """The last places of the last axis rotated as neighbors, forwards or back. cos, sin: [..., pairs]."""
    out, first = x.clone(), x.shape[-1] - 2 * cos.shape[-1]
    sin = -sin if inverse else sin
    even, odd = x[..., first::2], x[..., first + 1 :: 2]
    out[..., first::2] = even * cos - odd * sin
    out[..., first + 1 :: 2] = odd * cos + even * sin
    return out


def compress(
    rows: Tensor, kept: Tensor, cache: CompressedCache, layer: int, batch: ForwardBatch, how: Compressor
) -> None:
    """See `Ops.compress`. kept: [slots, rows before, 2 * width], left with each sequence's last rows."""
    table, flat = blocks_of(batch), cache.rows[layer].view(-1, how.dim)
    for number, (slot, tokens, begins) in enumerate(segments(batch)):
        before = torch.zeros_like(kept[slot]) if begins else kept[slot]
        known = torch.cat([before, rows[tokens]])
        start = int(batch.positions[tokens.start])
        end = start + tokens.stop - tokens.start
        places = cache.places(table[number], start // how.ratio, end // how.ratio)
        for entry, place in zip(range(start // how.ratio, end // how.ratio), places.tolist(), strict=True):
            at = entry * how.ratio - start + len(before)
            flat[place] = entry_of(known[at : at + how.ratio], earlier(known, at, entry, how), entry, how)
        kept[slot] = known[len(known) - len(before) :]


def earlier(known: Tensor, at: int, entry: int, how: Compressor) -> Tensor | None:
    """Rows of the group before, where groups overlap and there is one."""
    return known[at - how.ratio : at] if how.overlaps and entry else None


def entry_of(own: Tensor, before: Tensor | None, entry: int, how: Compressor) -> Tensor:
    """One entry: [dim]. own, before: [ratio, values | gates]."""
    values, gates = own[:, : how.width], own[:, how.width :] + how.position
    values, gates = values[:, -how.dim :], gates[:, -how.dim :]
    if before is not None:
        values = torch.cat([before[:, : how.dim], values])
        gates = torch.cat([before[:, how.width : how.width + how.dim] + how.position[:, : how.dim], gates])
    powers = (gates - gates.amax(0)).exp_()
    mixed: Tensor = (values * (powers / powers.sum(0))).sum(0)[None]
    if how.norm is not None:
        mixed = functional.rms_norm(mixed, how.norm.weight.shape, how.norm.weight, how.norm.eps)
    if how.inv_freq is None:
        return mixed[0]
    angle = how.inv_freq.double() * (entry * how.ratio)
    return turned(mixed, angle.cos().float(), angle.sin().float())[0]


def select_entries(
    q: Tensor, weights: Tensor, cache: CompressedCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
) -> list[Tensor | None]:
    """See `Ops.select_entries`: for each token the entries it attends, first to last; None: all there are."""
    selection: list[Tensor | None] = []
    for blocks, tokens in zip(blocks_of(batch), token_slices(batch), strict=True):
        seen = (batch.positions[tokens] + 1) // cache.ratio
        keys = cache.entries(layer, blocks, int(seen[-1]))
        for row, count in zip(range(tokens.start, tokens.stop), seen.tolist(), strict=True):
            if count <= spec.top_k:
                selection.append(None)
                continue
            # place by place: what an entry is worth does not depend on how many there are
            matches = (q[row].view(-1, 1, spec.dim) * keys[:count]).sum(-1).relu_()
            worth = residual.total([*(matches * weights[row][:, None])])
            best = torch.sort(worth, descending=True, stable=True).indices[: spec.top_k]
            selection.append(best.sort().values)
    return selection


def select_pools(
    q: Tensor, weights: Tensor, cache: CompressedCache, layer: int, step: StepPlan, spec: IndexerSpec
) -> list[Tensor]:
    """For each sequence, True where a query does not look: [queries, 1, keys], as `SequencePlan.hidden`."""
    picked, selection = select_entries(q, weights, cache, layer, step.batch, spec), []
    for plan in step.sequences:
        hidden = plan.hidden(None)
        for row, position in enumerate(range(plan.length - (plan.last - plan.first), plan.length)):
            best, whole = picked[plan.first + row], (position + 1) // cache.ratio
            if best is not None:
                groups = hidden[row, 0, : whole * cache.ratio].view(whole, cache.ratio)
                groups.fill_(True)[best] = False
        selection.append(hidden)
    return selection


def token_slices(batch: ForwardBatch) -> list[slice]:
    """Each sequence's tokens in the flat batch."""
    starts = batch.query_start_loc.tolist()
    return [slice(first, last) for first, last in pairwise(starts)]


def window_attention(
    q: Tensor,
    rows: Tensor,
    sinks: Tensor,
    kept: Tensor,
    batch: ForwardBatch,
    spec: WindowSpec,
    entries: Sequence[Tensor] | None,
) -> Tensor:
    """See `Ops.window_attention`. kept: [slots, window - 1, dim], left with each sequence's last rows.

    entries: for each token those it attends, [entries, dim].
    """
    geometry = AttentionSpec(spec.num_heads, 1, spec.dim, spec.scale)
    out = torch.empty_like(q)
    for slot, tokens, begins in segments(batch):
        before = torch.zeros_like(kept[slot]) if begins else kept[slot]
        known = torch.cat([before, rows[tokens]])
        for number, row in enumerate(range(tokens.start, tokens.stop)):
            near = known[number : number + spec.window]
            keys = near if entries is None else torch.cat([near, entries[row]])
            hidden = torch.arange(-(-len(keys) // TILE) * TILE) >= len(keys)
            hidden[: max(spec.window - 1 - int(batch.positions[row]), 0)] = True
            keys = functional.pad(keys, (0, 0, 0, len(hidden) - len(keys)))[None]
            out[row] = attend(q[row : row + 1], keys, keys, hidden[None, None], geometry, sinks)[0]
        kept[slot] = known[len(known) - len(before) :]
    return out


def attended(
    cache: CompressedCache, layer: int, batch: ForwardBatch, selection: Sequence[Tensor | None] | None
) -> list[Tensor]:
    """The entries that each token attends: [entries, dim] each."""
    found: list[Tensor] = []
    for blocks, tokens in zip(blocks_of(batch), token_slices(batch), strict=True):
        seen = (batch.positions[tokens] + 1) // cache.ratio
        all_entries = cache.entries(layer, blocks, int(seen[-1]))
        for row, count in zip(range(tokens.start, tokens.stop), seen.tolist(), strict=True):
            picked = None if selection is None else selection[row]
            found.append(all_entries[:count] if picked is None else all_entries[picked])
    return found


def soft_shares(w: Tensor, connection: SoftConnection) -> tuple[Tensor, Tensor]:
    """Reading shares [tokens, n]; writing shares and mixing [tokens, n + n · n] as `streams.write` takes them."""
    n, scale, base = connection.num_streams, connection.scale, connection.base
    reading = residual.sigmoid(w[:, :n] * scale[0] + base[:n]) + connection.eps
    if w.shape[-1] == n:
        return reading, w[:, :0]
    writing = 2 * residual.sigmoid(w[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mixing = balanced((w[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), connection)
    return reading, torch.cat([writing, mixing.transpose(1, 2).reshape(len(w), n * n)], -1)


def balanced(logits: Tensor, connection: SoftConnection) -> Tensor:
    """A softmax over rows, then columns, then rows and columns in turn. logits: [tokens, from, to]."""
    powers = (logits - logits.amax(-1, keepdim=True)).exp_()
    mixing = powers / residual.total(powers.unbind(-1))[:, :, None] + connection.eps
    for turn in range(connection.iterations):
        if turn:
            mixing = mixing / (residual.total(mixing.unbind(-1)) + connection.eps)[:, :, None]
        mixing = mixing / (residual.total(mixing.unbind(-2)) + connection.eps)[:, None, :]
    return mixing


def limited_silu_mul(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · up within ±limit, spelled out as `ReferenceOps.silu_mul` is."""
    gate = gate.clamp(max=limit)
    return (gate / gate.neg().exp_().add_(1)).mul_(up.clamp(-limit, limit))


def limited_outputs(x: Tensor, chosen: Tensor, limited: LimitedExperts) -> Tensor:
    """What each of a token's experts makes of it: [tokens, num_used, out]."""
    gate, up, down = limited.experts.gate, limited.experts.up, limited.experts.down
    outputs = x.new_empty(*chosen.shape, down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        rows = pad_rows(x[tokens])
        opened = limited_silu_mul(product(rows, gate[expert]), product(rows, up[expert]), limited.limit)
        outputs[tokens, ranks] = product(pad_rows(opened), down[expert])[: len(tokens)]
    return outputs
