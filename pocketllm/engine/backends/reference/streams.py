"""Parallel residual streams in plain torch: how a sublayer reads and writes them (`api.streams.HyperConnection`).

Sums over streams are written out, one stream after another: so a row has the same bits beside any neighbors.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from pocketllm.engine.backends.api.streams import HyperConnection


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, first to last."""
    return reduce(torch.add, parts)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), spelled out for the reason given at `ReferenceOps.silu_mul`."""
    return 1 / x.neg().exp_().add_(1)


def shares_of(w: Tensor, connection: HyperConnection) -> tuple[Tensor, Tensor]:
    """Reading shares [tokens, n]; writing shares and mixing matrix [tokens, n + n · n]. w: the projected rows."""
    n = connection.num_streams
    scale, base = connection.scale, connection.base
    reading = sigmoid(w[:, :n] * scale[0] + base[:n])
    writing = 2 * sigmoid(w[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (w[:, 2 * n :] * scale[2] + base[2 * n :]).clamp_(-connection.clamp, connection.clamp)
    mixing = doubly_stochastic(logits.view(-1, n, n), connection)
    return reading, torch.cat([writing, mixing.view(len(w), n * n)], -1)


def doubly_stochastic(logits: Tensor, connection: HyperConnection) -> Tensor:
    """Rows and columns divided by their sums in turn, columns last. logits: [tokens, to, from]."""
    mixing = (logits - logits.amax(-1, keepdim=True)).exp_()
    for _ in range(connection.iterations):
        mixing = mixing / (total(mixing.unbind(-1)) + connection.eps)[:, :, None]
        mixing = mixing / (total(mixing.unbind(-2)) + connection.eps)[:, None, :]
    return mixing


def read(streams: Tensor, reading: Tensor) -> Tensor:
    """Σ share · stream: [tokens, hidden]."""
    n = reading.shape[-1]
    parts = streams.view(len(streams), n, streams.shape[-1] // n)
    return total([reading[:, s, None] * parts[:, s] for s in range(n)])


def write(streams: Tensor, shares: Tensor, y: Tensor) -> Tensor:
    """share[to] · y + Σ mixing[to, from] · stream[from]: as `streams`."""
    n = streams.shape[-1] // y.shape[-1]
    parts = streams.view(len(streams), n, -1)
    mixing = shares[:, n:].view(-1, n, n)
    written = [shares[:, :n, None] * y[:, None], *(mixing[:, :, s, None] * parts[:, s, None] for s in range(n))]
    return total(written).view(streams.shape)
