"""Attention of many heads over one cached row a token, whose first values are key and value, and the rest a key.

A program has as many heads as an instruction of the tensor cores has rows: their queries stay in registers, and a tile
of cached rows in shared memory is the right operand of both products. Softmax in running form (Dao et al. 2022, arXiv
2205.14135), in splits where a sequence has one token.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.heads import read_heads
from pocketllm.engine.backends.cuda.kernels.launch import wait

NUMBERS = ("heads", "groups", "num_splits", "least", "most", "num_freq", "table_stride")
"""What no kernel is compiled for again."""


@triton.jit
def split_size(length, least, most):
    """Keys in a split: the least, doubled until there are no more than `most` splits; a length of its own tells."""
    size = least
    while size * most < length:
        size *= 2
    return size


@triton.jit
def slots_at(table, position, is_in, BLOCK: tl.constexpr, HAS_SELECTION: tl.constexpr):
    """Where rows at positions lie: by blocks of the sequence, or as a selection lists them. table: its first entry."""
    if HAS_SELECTION:
        return tl.load(table + position, mask=is_in, other=0)
    return tl.load(table + position // BLOCK, mask=is_in, other=0) * BLOCK + position % BLOCK


@triton.jit(do_not_specialize=NUMBERS)
def latent_kernel(
    q_latent, q_rope, angles, rows, table, lengths, starts, seqs, places, parts, marks, out,
    latent_stride, rope_stride, table_stride, heads, groups, num_splits, least, most,
    num_freq, scale,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, R_BLOCK: tl.constexpr, ROPE: tl.constexpr,
    P_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, ROTATION: tl.constexpr, ARE_SINGLE: tl.constexpr, HAS_SELECTION: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """HEADS heads of QUERIES tokens of one sequence over one split of its cached rows, or over all.

    ARE_SINGLE: one token each. Of sequences `seqs` at `places`; or with HAS_SELECTION, of every token, whose `table`
    has slots, as many as `lengths` says. Otherwise tiles of sequences, from the token `places` on, are cut further.
    parts: [singles, heads, splits, RANK]; marks: [singles, heads, splits, 2] largest score and Σ exp; unused where
    num_splits is 1, as then out is written: [tokens, heads · RANK].
    """
    wait()
    group, split, number = tl.program_id(0) % groups, tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, QUERIES * HEADS)
    head = group * HEADS + line % HEADS
    if ARE_SINGLE:
        if HAS_SELECTION:
            seq, token = number, line * 0 + number
        else:
            seq, token = tl.load(seqs + number), line * 0 + tl.load(places + number)
        length = tl.load(lengths + seq)
        is_row = head < heads
        size = split_size(length, least, most)
        first, end = split * size, tl.minimum((split + 1) * size, length)
        own_position = line * 0 + length
    else:
        seq = tl.load(seqs + number)
        start, stop, length = tl.load(starts + seq), tl.load(starts + seq + 1), tl.load(lengths + seq)
        query = tl.load(places + number) + tl.program_id(0) // groups * QUERIES
        row = query + line // HEADS
        token = start + row
        is_row = (head < heads) & (row < stop - start)
        own_position = length - (stop - start) + row
        first, end = 0, tl.minimum(length - (stop - start) + query + QUERIES, length)
        end = tl.where(query < stop - start, end, 0)
    if first < end:
        r = tl.arange(0, R_BLOCK)[None, :]
        at = token.to(tl.int64)[:, None] * latent_stride + head[:, None] * RANK
        q = tl.load(q_latent + at + r, mask=is_row[:, None] & (r < RANK), other=0.0)
        q = q.to(rows.dtype.element_ty)
        if ROPE > 0:
            at = token.to(tl.int64)[:, None] * rope_stride + head[:, None] * ROPE
            turned = read_heads(
                q_rope, at, token[:, None], is_row[:, None], q_rope, 0.0, angles, num_freq,
                ROPE, P_BLOCK, False, ROTATION,
            )  # fmt: skip
            turned = turned.to(rows.dtype.element_ty)
        own_table = table + seq.to(tl.int64) * table_stride
        largest = tl.full([QUERIES * HEADS], -1e30, tl.float32)
        total = tl.zeros([QUERIES * HEADS], tl.float32)
        acc = tl.zeros([QUERIES * HEADS, R_BLOCK], tl.float32)
        key = tl.arange(0, TILE)
        slot = slots_at(own_table, first + key, first + key < end, BLOCK, HAS_SELECTION)
        for begin in tl.range(first, end, TILE, num_stages=STAGES):
            position, own_slot = begin + key, slot
            is_in = position < end
            ahead = position + TILE  # known before its rows are asked for, so that several tiles are on their way
            slot = slots_at(own_table, ahead, ahead < end, BLOCK, HAS_SELECTION)
            row_at = rows + own_slot.to(tl.int64)[:, None] * (RANK + ROPE)
            some = tl.load(row_at + r, mask=is_in[:, None] & (r < RANK), other=0.0)
            scores = tl.dot(q, tl.trans(some), input_precision=PRECISION)
            if ROPE > 0:
                p = tl.arange(0, P_BLOCK)[None, :]
                keys = tl.load(row_at + RANK + p, mask=is_in[:, None] & (p < ROPE), other=0.0)
                scores = tl.dot(turned, tl.trans(keys), scores, input_precision=PRECISION)
            is_seen = is_in[None, :]
            if not ARE_SINGLE:
                is_seen = is_seen & (position[None, :] <= own_position[:, None])
            scores = tl.where(is_seen, scores * scale, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            weights, shrink = tl.exp(scores - new[:, None]), tl.exp(largest - new)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(some.dtype), some, acc * shrink[:, None], input_precision=PRECISION)
            largest = new
        is_out = is_row[:, None] & (r < RANK)
        if num_splits == 1:
            acc = acc / tl.maximum(total, 1e-30)[:, None]
            to = (token.to(tl.int64) * heads + head)[:, None] * RANK + r
            tl.store(out + to, acc, mask=is_out)
        else:
            part = (number.to(tl.int64) * heads + head) * num_splits + split
            tl.store(parts + part[:, None] * RANK + r, acc, mask=is_out)
            tl.store(marks + part * 2, largest, mask=is_row)
            tl.store(marks + part * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=NUMBERS)
def merge_kernel(
    parts, marks, lengths, seqs, places, out, heads, num_splits, least, most,
    RANK: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, HAS_SELECTION: tl.constexpr,
):  # fmt: skip
    """CHUNK values of one head of one token from its splits, in their order, AT_ONCE at a time."""
    wait()
    chunk, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if HAS_SELECTION:
        seq, token = number, number
    else:
        seq, token = tl.load(seqs + number), tl.load(places + number)
    length = tl.load(lengths + seq)
    last = tl.cdiv(length, split_size(length, least, most))
    base = (number.to(tl.int64) * heads + head) * num_splits
    e = chunk * CHUNK + tl.arange(0, CHUNK)
    largest, total = tl.full([], -1e30, tl.float32), tl.zeros([], tl.float32)
    acc = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, last, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        is_in = split < last
        tops = tl.load(marks + (base + split) * 2, mask=is_in, other=-1e30)
        sums = tl.load(marks + (base + split) * 2 + 1, mask=is_in, other=0.0)
        at = (base + split)[:, None] * RANK + e[None, :]
        some = tl.load(parts + at, mask=is_in[:, None] & (e < RANK)[None, :], other=0.0)
        new = tl.maximum(largest, tl.max(tops, 0))
        shrink, weights = tl.exp(largest - new), tl.exp(tops - new)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * some, 0)
        largest = new
    to = (token.to(tl.int64) * heads + head) * RANK + e
    tl.store(out + to, acc / tl.maximum(total, 1e-30), mask=e < RANK)


@triton.jit
def store_kernel(
    first, first_weight, second, angles, rows, slots, first_stride, second_stride, eps, num_freq,
    WIDTH: tl.constexpr, W_BLOCK: tl.constexpr, KEY: tl.constexpr, K_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    FIRST_ROTATION: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Write a token's row into the cache: WIDTH values, normed or rotated, and KEY more; without a slot it is left."""
    wait()
    token = tl.program_id(0).to(tl.int64)
    one = tl.full([1, 1], 0, tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    to = rows + slot * (WIDTH + KEY)
    value = read_heads(
        first, one + token * first_stride, one + token, one == 0, first_weight, eps, angles, num_freq,
        WIDTH, W_BLOCK, HAS_NORM, FIRST_ROTATION,
    )  # fmt: skip
    d = tl.arange(0, W_BLOCK)[None, :]
    tl.store(to + d, value.to(rows.dtype.element_ty), mask=(d < WIDTH) & (one + slot >= 0))
    if KEY > 0:
        value = read_heads(
            second, one + token * second_stride, one + token, one == 0, second, 0.0, angles, num_freq,
            KEY, K_BLOCK, False, ROTATION,
        )  # fmt: skip
        d = tl.arange(0, K_BLOCK)[None, :]
        tl.store(to + WIDTH + d, value.to(rows.dtype.element_ty), mask=(d < KEY) & (one + slot >= 0))
