"""Parallel residual streams (`api.streams.HyperConnection`, `api.compressed.SoftConnection`).

Sums over streams are written out, one stream after another: so a row has the same bits beside any neighbors.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def logits_kernel(streams, w, logits, width, count, eps, LINE: tl.constexpr):
    """logits[t, s] = w[s] · x[t] / rms(x[t]) for one share of one token, in float32."""
    share, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total, squares = tl.zeros([LINE], tl.float32), tl.zeros([LINE], tl.float32)
    wait()
    for first in range(0, width, LINE):
        i = first + tl.arange(0, LINE)
        x = tl.load(streams + token * width + i, mask=i < width, other=0.0)
        total += tl.load(w + share * width + i, mask=i < width, other=0.0).to(tl.float32) * x
        squares += x * x
    factor = 1 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    tl.store(logits + token * count + share, tl.sum(total, 0) * factor)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def balanced(z, is_in, eps, ITERATIONS: tl.constexpr, IS_SOFT: tl.constexpr):
    """Rows and columns divided by their sums in turn (Sinkhorn & Knopp 1967), columns last."""
    mixing = tl.where(is_in, tl.exp(z - tl.max(z, 1)[:, None]), 0.0)
    if IS_SOFT:
        mixing = tl.where(is_in, mixing / tl.maximum(tl.sum(mixing, 1), 1e-30)[:, None] + eps, 0.0)
    for turn in range(ITERATIONS):
        if not IS_SOFT or turn > 0:
            mixing = mixing / (tl.sum(mixing, 1) + eps)[:, None]
        mixing = mixing / (tl.sum(mixing, 0) + eps)[None, :]
    return mixing


@triton.jit
def read_kernel(
    streams, logits, scale, base, x, shares, hidden, clamp, eps,
    STREAMS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, ITERATIONS: tl.constexpr, IS_SOFT: tl.constexpr,
    WRITES: tl.constexpr,
):  # fmt: skip
    """x = Σ reading share · stream, CHUNK values a program; the first of a token also makes the shares that write.

    shares: [tokens, STREAMS writing | STREAMS · STREAMS mixing, by the taking stream]. WRITES: whether there are any.
    """
    wait()
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count: tl.constexpr = STREAMS * (2 + STREAMS) if WRITES else STREAMS
    own, h = logits + token * count, chunk * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for s in tl.static_range(STREAMS):
        share = sigmoid(tl.load(own + s) * tl.load(scale) + tl.load(base + s))
        if IS_SOFT:
            share += eps
        total += share * tl.load(streams + (token * STREAMS + s) * hidden + h, mask=h < hidden, other=0.0)
    tl.store(x + token * hidden + h, total, mask=h < hidden)
    if WRITES:
        if chunk == 0:
            n = tl.arange(0, N)
            is_in = n < STREAMS
            z = tl.load(own + STREAMS + n, mask=is_in, other=0.0) * tl.load(scale + 1)
            z += tl.load(base + STREAMS + n, mask=is_in, other=0.0)
            to = shares + token * (STREAMS + STREAMS * STREAMS)
            tl.store(to + n, 2 * sigmoid(z), mask=is_in)
            at = n[:, None] * STREAMS + n[None, :]
            is_in = is_in[:, None] & is_in[None, :]
            z = tl.load(own + 2 * STREAMS + at, mask=is_in, other=0.0) * tl.load(scale + 2)
            z += tl.load(base + 2 * STREAMS + at, mask=is_in, other=0.0)
            if not IS_SOFT:
                z = tl.minimum(tl.maximum(z, -clamp), clamp)
            mixing = balanced(tl.where(is_in, z, float("-inf")), is_in, eps, ITERATIONS, IS_SOFT)
            if IS_SOFT:  # it takes what comes from the stream of its row
                at = n[None, :] * STREAMS + n[:, None]
            tl.store(to + STREAMS + at, mixing, mask=is_in)


@triton.jit
def write_kernel(streams, shares, y, out, y_stride, hidden, STREAMS: tl.constexpr, CHUNK: tl.constexpr):
    """out[to] = writing share[to] · y + Σ mixing[to, from] · stream[from]."""
    wait()
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    own = shares + token * (STREAMS + STREAMS * STREAMS)
    new = tl.load(y + token * y_stride + h, mask=h < hidden, other=0.0)
    for to in tl.static_range(STREAMS):
        total = tl.load(own + to) * new
        for source in tl.static_range(STREAMS):
            stream = tl.load(streams + (token * STREAMS + source) * hidden + h, mask=h < hidden, other=0.0)
            total += tl.load(own + STREAMS + to * STREAMS + source) * stream
        tl.store(out + (token * STREAMS + to) * hidden + h, total, mask=h < hidden)
