"""Recurrent layers in plain torch: a sequence at a time, and within it a token at a time.

Every token's arithmetic has the shape of one token, whatever the step holds: so the result is the same to the bit
however a prompt was chunked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.recurrent import UNIT_EPS, DeltaNet, KimiDelta


@dataclass
class StateSlots:
    """conv: one tensor a layer, [slots, rows, channels]; delta: [slots, heads, key_dim, value_dim]."""

    conv: Sequence[Tensor]
    delta: Sequence[Tensor]


def segments(batch: ForwardBatch) -> Iterator[tuple[int, slice, bool]]:
    """Of each sequence its slot, its tokens in the flat batch, and whether it begins with them."""
    starts = batch.query_start_loc.tolist()
    for row, (slot, length) in enumerate(zip(batch.state_slots.tolist(), batch.seq_lens.tolist(), strict=True)):
        first, last = starts[row], starts[row + 1]
        yield slot, slice(first, last), length == last - first


def convolve(x: Tensor, kernel: Tensor, kept: Tensor, batch: ForwardBatch, dilation: int = 1) -> Tensor:
    """Depthwise, causal, tap after tap. kept: [slots, rows before, channels], left with each sequence's last inputs."""
    out = torch.empty_like(x)
    taps = kernel.shape[1]
    for slot, tokens, begins in segments(batch):
        before = torch.zeros_like(kept[slot]) if begins else kept[slot]
        rows = torch.cat([before, x[tokens]])
        count = tokens.stop - tokens.start
        total = rows[:count] * kernel[:, 0]
        for tap in range(1, taps):
            total += rows[tap * dilation : tap * dilation + count] * kernel[:, tap]
        out[tokens] = total
        kept[slot] = rows[count:]
    return out


def delta_rule(mixed: Tensor, step: Tensor, share: Tensor, net: DeltaNet, kept: Tensor, batch: ForwardBatch) -> Tensor:
    """See `Ops.gated_delta`. kept: [slots, heads, key_dim, value_dim], left with each sequence's last state."""
    keys = net.num_key_heads * net.key_dim
    heads = torch.arange(net.num_value_heads)
    own = heads % net.num_key_heads if net.is_tiled else heads // (net.num_value_heads // net.num_key_heads)
    q = unit(mixed[:, :keys].view(len(mixed), -1, net.key_dim))[:, own] * net.key_dim**-0.5
    k = unit(mixed[:, keys : 2 * keys].view(len(mixed), -1, net.key_dim))[:, own]
    v = mixed[:, 2 * keys :].view(len(mixed), -1, net.value_dim)
    decay = (net.rate * softplus(step + net.time_bias)).exp_()
    return token_by_token(q, k, v, decay[:, :, None, None], share, kept, batch)


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, share: Tensor, net: KimiDelta, kept: Tensor, batch: ForwardBatch
) -> Tensor:
    """See `Ops.kimi_delta`. kept: [slots, heads, dim, dim], left with each sequence's last state."""
    by_head = (len(q), net.num_heads, net.dim)
    q, k = unit(q.view(by_head)) * net.dim**-0.5, unit(k.view(by_head))
    logits, rate = (step + net.time_bias).view(by_head), net.rate[:, None]
    if net.lower_bound is None:
        decay = (rate * softplus(logits)).exp_()
    else:
        decay = (net.lower_bound / (rate * logits).exp_().add_(1)).exp_()
    return token_by_token(q, k, v.view(by_head), decay[..., None], share, kept, batch)


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, share: Tensor, kept: Tensor, batch: ForwardBatch
) -> Tensor:
    """The rule of both. q, k, v: [tokens, heads, dim]; decay: [tokens, heads, key_dim or 1, 1]; share: logits."""
    weight = 1 / share.neg().exp_().add_(1)
    out = torch.empty_like(v)
    for slot, tokens, begins in segments(batch):
        state = torch.zeros_like(kept[slot]) if begins else kept[slot].clone()
        for at in range(tokens.start, tokens.stop):
            state *= decay[at]
            key = k[at, :, :, None]
            error = (v[at] - (state * key).sum(1)) * weight[at, :, None]
            state += key * error[:, None]
            out[at] = (state * q[at, :, :, None]).sum(1)
        kept[slot] = state
    return out.view(len(out), -1)


def unit(x: Tensor) -> Tensor:
    """x / √(Σ x² + UNIT_EPS) over the last axis."""
    return x / ((x * x).sum(-1, keepdim=True) + UNIT_EPS).sqrt_()


def softplus(x: Tensor) -> Tensor:
    """ln(1 + eˣ); x itself where float32 knows no difference."""
    return torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())


def copy_slots(states: StateSlots, sources: Sequence[int], targets: Sequence[int]) -> None:
    """One after another."""
    for source, target in zip(sources, targets, strict=True):
        for kept in (*states.conv, *states.delta):
            kept[target] = kept[source]


def new_slots(num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int) -> StateSlots:
    """Zeros that take no memory until they are written, as for `new_kv_cache`."""

    def zeros(shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.from_numpy(np.zeros((num_slots, *shape), np.float32)) for _ in range(num_layers)]

    return StateSlots(zeros(conv), zeros(delta))
