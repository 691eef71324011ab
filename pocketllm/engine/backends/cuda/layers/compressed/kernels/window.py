"""Attention of all heads over a sequence's latest rows and over entries: each is key and value of all heads.

A program has as many heads of a token as an instruction of the tensor cores has rows, as in latent attention. Keys are
counted from the first of the window on, and entries after them, in splits that a token's own number of keys tells.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.attention import opened
from pocketllm.engine.backends.cuda.kernels.heads import read_heads
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.layers.latent.kernels.attention import split_size
from pocketllm.engine.backends.cuda.layers.latent.kernels.selection import entry_slots, seq_of


@triton.jit
def add_rows(state, q, some, is_seen, scale, PRECISION: tl.constexpr):
    """A tile of rows added to the largest scores, sums of weights and sums of values of heads."""
    largest, total, acc = state
    scores = tl.dot(q, tl.trans(some), input_precision=PRECISION)
    scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    weights, shrink = tl.exp(scores - new[:, None]), tl.exp(largest - new)
    acc = tl.dot(weights.to(some.dtype), some, acc * shrink[:, None], input_precision=PRECISION)
    return new, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def slots_of(table, entry, is_in, BLOCK: tl.constexpr, RATIO: tl.constexpr, HAS_SELECTION: tl.constexpr):
    """Where entries lie: as a selection lists them, or by blocks of the sequence. table: its first."""
    if HAS_SELECTION:
        return tl.load(table + entry, mask=is_in, other=0)
    return entry_slots(table, entry, is_in, BLOCK, RATIO)


@triton.jit
def add_near(
    state, q, rows, kept, first, end, token, position, start, rows_stride, scale, dtype: tl.constexpr,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [first, end) of the window that ends with a token; those before position `start` are kept ones."""
    d = tl.arange(0, D_BLOCK)[None, :]
    for begin in tl.range(first, end, TILE, num_stages=STAGES):
        key = begin + tl.arange(0, TILE)
        at = position - (WINDOW - 1) + key
        is_in = (key < end) & (at >= 0)
        new = rows + (token + at - position).to(tl.int64) * rows_stride
        own = tl.where(at >= start, new, kept + at % (WINDOW - 1) * DIM)
        some = tl.load(own[:, None] + d, mask=is_in[:, None] & (d < DIM), other=0.0).to(dtype)
        state = add_rows(state, q, some, is_in, scale, PRECISION)
    return state


@triton.jit
def add_far(
    state, q, entries, table, first, end, scale,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, HAS_SELECTION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Entries [first, end) of those that a token attends."""
    d, key = tl.arange(0, D_BLOCK)[None, :], tl.arange(0, TILE)
    slot = slots_of(table, first + key, first + key < end, BLOCK, RATIO, HAS_SELECTION)
    for begin in tl.range(first, end, TILE, num_stages=STAGES):
        is_in, own = begin + key < end, slot
        ahead = begin + TILE + key  # known before its rows are asked for, so that several tiles are on their way
        slot = slots_of(table, ahead, ahead < end, BLOCK, RATIO, HAS_SELECTION)
        at = entries + own.to(tl.int64)[:, None] * DIM
        some = tl.load(at + d, mask=is_in[:, None] & (d < DIM), other=0.0)
        state = add_rows(state, q, some, is_in, scale, PRECISION)
    return state


@triton.jit(do_not_specialize=("seqs", "heads", "num_splits", "least", "most", "num_freq", "table_stride"))
def window_kernel(
    q, q_weight, angles, rows, kept, entries, sinks, table, counts, slots, starts, lengths, positions, parts, marks,
    out, own_lengths, q_stride, rows_stride, table_stride, seqs, heads, num_splits, least, most, eps, num_freq, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, PER_BLOCK: tl.constexpr,
    RATIO: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, STAGES: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    HAS_SELECTION: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr, SEQS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token over one split of its keys, or over all.

    rows: [tokens, DIM] of this step; kept: [slots, WINDOW - 1, DIM] those before, as a ring; table: blocks of
    sequences, or with HAS_SELECTION slots of entries, as many as `counts` says. parts: [tokens, heads, splits, DIM];
    marks: [tokens, heads, splits, 2] largest score and Σ exp; unused where num_splits is 1, as then out is written:
    [tokens, heads · DIM]. own_lengths: [tokens] how many keys a token has, 0 of nobody's.
    """
    wait()
    group, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = seq_of(starts, token, seqs, SEQS)
    slot, position = tl.load(slots + seq).to(tl.int64), tl.load(positions + token)
    start = tl.load(lengths + seq) - (tl.load(starts + seq + 1) - tl.load(starts + seq))
    length = WINDOW
    own_table = table + seq.to(tl.int64) * table_stride
    if HAS_SELECTION:
        length += tl.load(counts + token)
        own_table = table + token * table_stride
    elif HAS_ENTRIES:
        length += (position + 1) // RATIO
    length = tl.where(slot >= 0, length, 0)
    if (group == 0) & (split == 0):
        tl.store(own_lengths + token, length)
    size = split_size(length, least, most)
    first, end = split * size, tl.minimum((split + 1) * size, length)
    if first < end:
        line = tl.arange(0, HEADS)
        head = group * HEADS + line
        is_row = head < heads
        at = token * q_stride + head[:, None].to(tl.int64) * DIM
        own_q = read_heads(
            q, at, token + line[:, None] * 0, is_row[:, None], q_weight, eps, angles, num_freq,
            DIM, BLOCK, HAS_NORM, ROTATION,
        ).to(entries.dtype.element_ty)  # fmt: skip
        largest, total = opened(sinks, head, is_row & (line * 0 + split == 0), HEADS, True)
        state = (largest, total, tl.zeros([HEADS, BLOCK], tl.float32))
        state = add_near(
            state, own_q, rows, kept + slot * ((WINDOW - 1) * DIM), first, tl.minimum(end, WINDOW), token, position,
            start, rows_stride, scale, entries.dtype.element_ty, DIM, BLOCK, WINDOW, NEAR, STAGES, PRECISION,
        )  # fmt: skip
        if HAS_ENTRIES:
            state = add_far(
                state, own_q, entries, own_table, tl.maximum(first - WINDOW, 0), end - WINDOW, scale,
                DIM, BLOCK, PER_BLOCK, RATIO, FAR, STAGES, HAS_SELECTION, PRECISION,
            )  # fmt: skip
        largest, total, acc = state
        d = tl.arange(0, BLOCK)[None, :]
        is_out = is_row[:, None] & (d < DIM)
        if num_splits == 1:
            to = (token * heads + head)[:, None] * DIM + d
            tl.store(out + to, acc / tl.maximum(total, 1e-30)[:, None], mask=is_out)
        else:
            part = (token * heads + head) * num_splits + split
            tl.store(parts + part[:, None] * DIM + d, acc, mask=is_out)
            tl.store(marks + part * 2, largest, mask=is_row)
            tl.store(marks + part * 2 + 1, total, mask=is_row)
