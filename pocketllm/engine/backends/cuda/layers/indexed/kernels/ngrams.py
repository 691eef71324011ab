"""Which rows of a table tokens and those before them look up, and gates of parallel streams."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.layers.latent.kernels.selection import seq_of


@triton.jit
def ngram_kernel(
    ids, kept, slots, starts, lengths, multipliers, sizes, offsets, out, seqs, end_token, heads,
    SIZE: tl.constexpr, PER_LENGTH: tl.constexpr, P_BLOCK: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """One token's rows, [tokens, heads]. kept: float32 [slots, SIZE - 1], ids before the step less end_token,
    the latest last.

    Products and XOR in 64-bit integers that wrap; a remainder is never below 0.
    """
    wait()
    token = tl.program_id(0)
    seq = seq_of(starts, token, seqs, SEQS)
    start, slot = tl.load(starts + seq), tl.load(slots + seq).to(tl.int64)
    is_kept = (tl.load(lengths + seq) > tl.load(starts + seq + 1) - start) & (slot >= 0)
    h = tl.arange(0, P_BLOCK)
    mixed = tl.load(ids + token).to(tl.int64) * tl.load(multipliers)
    is_open = token >= 0
    for back in tl.static_range(1, SIZE):
        at = token - start - back
        new = tl.load(ids + token - back, mask=at >= 0, other=0)
        old = tl.load(kept + slot * (SIZE - 1) + SIZE - 1 + at, mask=is_kept & (at < 0), other=0.0)
        earlier = tl.where(at >= 0, new, old.to(tl.int32) + end_token)
        earlier = tl.where(is_open, earlier, end_token)
        is_open = is_open & (earlier != end_token)  # what lies before an end of text is not seen
        mixed = mixed ^ (earlier.to(tl.int64) * tl.load(multipliers + back))
        head = (back - 1) * PER_LENGTH + h
        size = tl.load(sizes + head, mask=h < PER_LENGTH, other=1)
        row = mixed % size
        row = tl.where(row < 0, row + size, row) + tl.load(offsets + head, mask=h < PER_LENGTH, other=0)
        tl.store(out + token.to(tl.int64) * heads + head, row.to(tl.int32), mask=h < PER_LENGTH)


@triton.jit
def gate_kernel(keys, queries, value, out, value_stride, hidden, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """One stream of a token: sigmoid(±√|key · query / √hidden|) · value; keys, queries and out are contiguous."""
    wait()
    token, stream, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    at = (token * STREAMS + stream) * hidden + d
    key = tl.load(keys + at, mask=d < hidden, other=0.0)
    match = tl.sum(key * tl.load(queries + at, mask=d < hidden, other=0.0), 0) / tl.sqrt(hidden.to(tl.float32))
    gate = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    gate = tl.where(match > 0, gate, tl.where(match < 0, -gate, 0.0))
    own = tl.load(value + token * value_stride + d, mask=d < hidden, other=0.0)
    tl.store(out + at, own / (1 + tl.exp(-gate)), mask=d < hidden)
