"""Attention over the groups of tokens that an index picks, and rows of hashed n-grams, in plain torch."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.reference.attention import PagedCache, StepPlan, attend, gather
from pocketllm.engine.backends.reference.recurrent import segments


def selected_attention(
    q: Tensor, cache: PagedCache, layer: int, step: StepPlan, spec: AttentionSpec, selection: Sequence[Tensor]
) -> Tensor:
    """`paged_attention` over the keys that are selected."""
    parts = []
    for plan, hidden in zip(step.sequences, selection, strict=True):
        keys, values = gather(cache.keys[layer], plan), gather(cache.values[layer], plan)
        values[:, plan.length :] = 0.0  # as in `paged_attention`
        parts.append(attend(q[plan.first : plan.last], keys, values, hidden, spec))
    return torch.cat(parts)


def select_groups(q: Tensor, rows: Tensor, step: StepPlan, index: GroupIndex) -> list[Tensor]:
    """For each sequence, True where a query does not look: [queries, 1, keys], as `SequencePlan.hidden`."""
    selection = []
    for plan in step.sequences:
        keys = group_keys(gather(rows, plan)[0, : plan.length], index)
        hidden = plan.hidden(None)
        for row, query in enumerate(q[plan.first : plan.last].view(-1, index.num_heads, index.dim)):
            whole = (plan.length - (plan.last - plan.first) + row + 1) // index.ratio
            if whole > index.num_best:
                # element by element: what a group is worth does not depend on how many there are
                worth = (query * keys[:whole, None]).sum(-1).relu_().sum(-1)
                left = torch.sort(worth, descending=True, stable=True).indices[index.num_best :]
                hidden[row, 0, : whole * index.ratio].view(whole, index.ratio)[left] = True
        selection.append(hidden)
    return selection


def group_keys(raw: Tensor, index: GroupIndex) -> Tensor:
    """Keys of all whole groups: [groups, dim]. raw: [tokens, dim]."""
    count = len(raw) // index.ratio
    means = raw[: count * index.ratio].view(count, index.ratio, index.dim).mean(1)
    normed = functional.rms_norm(means, index.norm.weight.shape, index.norm.weight, index.norm.eps)
    angle = (torch.arange(count).double() * index.ratio)[:, None] * index.inv_freq.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    half = cos.shape[-1]
    first, second = normed[:, :half], normed[:, half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, normed[:, 2 * half :]], -1)


def ngram_rows(ngrams: NGrams, kept: Tensor, batch: ForwardBatch) -> Tensor:
    """Which rows of the table each token and head looks up: [tokens, heads].

    kept: [slots, tokens before, 1], left with each sequence's last ids.
    """
    ids, size = batch.input_ids.astype(np.int64), len(ngrams.multipliers)
    earlier = np.full((size, len(ids)), ngrams.end_token, np.int64)
    for slot, tokens, begins in segments(batch):
        past = np.full(size - 1, ngrams.end_token) if begins else kept[slot, :, 0].numpy().astype(np.int64)
        history = np.concatenate([past, ids[tokens]])
        is_open = np.ones(tokens.stop - tokens.start, bool)
        for back in range(size):
            token = history[size - 1 - back : len(history) - back]
            earlier[back, tokens] = np.where(is_open, token, ngrams.end_token)
            # the token itself may end a text; what lies before one that does is not seen
            is_open &= (token != ngrams.end_token) | (back == 0)
        kept[slot, :, 0] = torch.from_numpy(history[len(history) - size + 1 :].astype(np.float32))
    return torch.from_numpy(hashed(earlier, ngrams))


def hashed(earlier: npt.NDArray[np.int64], ngrams: NGrams) -> npt.NDArray[np.int64]:
    """Rows by token and head. earlier: [tokens back, tokens]."""
    mixed, rows = earlier[0] * np.int64(ngrams.multipliers[0]), []
    for back in range(1, len(earlier)):
        mixed = mixed ^ (earlier[back] * np.int64(ngrams.multipliers[back]))
        heads = range((back - 1) * ngrams.heads_per_length, back * ngrams.heads_per_length)
        rows += [mixed % ngrams.sizes[head] + ngrams.offsets[head] for head in heads]
    return np.stack(rows, axis=1)


def gate_streams(keys: Tensor, queries: Tensor, value: Tensor) -> Tensor:
    """See `Ops.gate_streams`."""
    tokens, hidden = value.shape
    matches = (keys * queries).view(tokens, -1, hidden).sum(-1, keepdim=True) / math.sqrt(hidden)
    gates = matches.abs().clamp_(min=1e-6).sqrt_() * matches.sign()
    return (value[:, None] / gates.neg().exp_().add_(1)).view(tokens, -1)


def add_gated(streams: Tensor, gates: Tensor, y: Tensor) -> Tensor:
    """See `Ops.add_gated`."""
    shares: Tensor = 2 / gates.neg().exp_().add_(1)
    return streams + (shares[:, :, None] * y[:, None]).view(len(y), -1)
