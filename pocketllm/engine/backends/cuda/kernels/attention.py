"""Paged attention: one query a sequence over splits of its keys, and tiles of queries of longer pieces.

Splits and tiles of keys begin at fixed places, so that a row's result does not depend on the step it is in. Softmax in
running form (Dao et al. 2022, arXiv 2205.14135; splits: Dao 2023, "Flash-Decoding").
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.heads import (
    add_values,
    keep,
    multiplied,
    narrowed,
    read_heads,
    scales_at,
    score_scale,
)
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.rows import exponential_tanh, write_bytes


@triton.jit
def block_of(table, position, end, BLOCK: tl.constexpr):
    """Blocks of positions before the end."""
    return tl.load(table + position // BLOCK, mask=position < end, other=0)


@triton.jit
def read_slots(
    cache, block, position, is_in, head, heads, BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr
):
    """Keys or values at positions of blocks, [positions, D_BLOCK]; zeros where is_in is false. Without their scales."""
    slot = block.to(tl.int64) * BLOCK + position % BLOCK
    d = tl.arange(0, D_BLOCK)[None, :]
    at = (slot[:, None] * heads + head) * DIM + d
    return multiplied(tl.load(cache + at, mask=is_in[:, None] & (d < DIM), other=0.0), cache)


@triton.jit
def scores_of(q, keys, scale, softcap, is_seen, HAS_SOFTCAP: tl.constexpr):
    """Scaled, capped and masked scores, [queries, positions]."""
    scores = tl.dot(q, tl.trans(keys)) * scale
    if HAS_SOFTCAP:
        scores = softcap * exponential_tanh(scores / softcap)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def opened(sinks, head, has_sink, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The largest score and the sum of weights before any key: none, or each head's own sink where has_sink is true.

    head, has_sink: [ROWS].
    """
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + head, mask=has_sink, other=-1e30)
        total = tl.where(has_sink, 1.0, 0.0)
    return largest, total


@triton.jit
def read_new(
    k, k_weight, v, angles, token, head, behind, k_stride, v_stride, eps, num_freq, keys, values,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """A token's own key and value of one head as the cache keeps them, each with its scale: [1, D_BLOCK], [1],
    [1, V_BLOCK], [1]; zeros where behind is not 0."""
    one = tl.full([1, 1], 0, tl.int64)
    key = read_heads(
        k, one + token.to(tl.int64) * k_stride + head * DIM, one + token, one + behind == 0, k_weight, eps, angles,
        num_freq, DIM, D_BLOCK, HAS_NORM, ROTATION,
    )  # fmt: skip
    e = tl.arange(0, V_BLOCK)[None, :]
    value = tl.load(
        v + token.to(tl.int64) * v_stride + head * V_DIM + e, mask=(e < V_DIM) & (e * 0 + behind == 0), other=0.0
    )
    key, key_scale = narrowed(key, keys)
    value, value_scale = narrowed(value, values)
    return key, key_scale, value, value_scale


@triton.jit
def add_keys(
    state, own, keys, values, key_scales, value_scales, block, first, low, end, head, kv_heads, scale,
    softcap, TILE: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A tile of cached keys and their values added to the largest scores, sums and acc of queries."""
    largest, total, acc = state
    position = first + tl.arange(0, TILE)
    is_in = (position >= low) & (position < end)
    some = read_slots(keys, block, position, is_in, head, kv_heads, BLOCK, DIM, D_BLOCK)
    at = scales_at(block, position, head, kv_heads, BLOCK)
    by = score_scale(scale, keys, key_scales + at, is_in)
    scores = scores_of(own, some, by, softcap, is_in[None, :], HAS_SOFTCAP)
    new = tl.maximum(largest, tl.max(scores, 1))
    weights, shrink = tl.exp(scores - new[:, None]), tl.exp(largest - new)
    some = read_slots(values, block, position, is_in, head, kv_heads, BLOCK, V_DIM, V_BLOCK)
    acc = add_values(acc * shrink[:, None], weights, some, values, value_scales + at, is_in)
    return new, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def write_attended(
    acc, total, out, out_halves, out_marks, token, head, kv_heads, units, GROUP: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, HAS_HALVES: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """A key head's GROUP heads of a token, and with HAS_HALVES the same as the next product reads a single row.

    acc: [rows, V_BLOCK], rows from GROUP on are nobody's. IS_FULL: all heads together fill whole blocks of units.
    """
    rows: tl.constexpr = acc.shape[0]
    g, e = tl.arange(0, rows)[:, None], tl.arange(0, V_BLOCK)[None, :]
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    to = ((token.to(tl.int64) * kv_heads + head) * GROUP + g) * V_DIM + e
    tl.store(out + to, acc, mask=(g < GROUP) & (e < V_DIM))
    if HAS_HALVES:
        lines: tl.constexpr = V_DIM // 32
        line = tl.arange(0, rows * lines)
        line = tl.where(line < GROUP * lines, head * (GROUP * lines) + line, units)
        write_bytes(out_halves, out_marks, tl.reshape(acc, [rows * lines, 32]), line, units)
        if not IS_FULL:  # zeros up to the end of the last block
            after = kv_heads * (GROUP * lines) + tl.arange(0, 4)
            after = tl.where(head == kv_heads - 1, after, units)
            write_bytes(out_halves, out_marks, tl.zeros([4, 32], tl.float32), after, units)


@triton.jit
def merged(
    parts, marks, base, first, last, num_splits, GROUP: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Splits first to last - 1 of GROUP heads put together, AT_ONCE at a time: acc [HEADS, V_BLOCK] and sums."""
    g, e = tl.arange(0, HEADS)[:, None, None], tl.arange(0, V_BLOCK)[None, None, :]
    largest = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, V_BLOCK], tl.float32)
    # from a fixed place on: the order of sums is a row's own
    for begin in range(first // AT_ONCE * AT_ONCE, last, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)[None, :, None]
        is_in = (split >= first) & (split < last) & (g < GROUP)
        at = (base + g) * num_splits + split
        tops = tl.load(marks + at * 2, mask=is_in, other=-1e30)
        sums = tl.load(marks + at * 2 + 1, mask=is_in, other=0.0)
        some = tl.load(parts + at * V_DIM + e, mask=is_in & (e < V_DIM), other=0.0)
        new = tl.maximum(largest, tl.reshape(tl.max(tops, 1), [HEADS]))
        shrink, weights = tl.exp(largest - new), tl.exp(tops - new[:, None, None])
        total = total * shrink + tl.reshape(tl.sum(weights * sums, 1), [HEADS])
        acc = acc * shrink[:, None] + tl.sum(weights * some, 1)
        largest = new
    return acc, total


@triton.jit
def splits_of(length, window, SPLIT: tl.constexpr, WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key that is seen, how many keys a split has, the first split and the one after the last."""
    low = length * 0
    if HAS_WINDOW:
        low = tl.maximum(length - window, 0)
    if WHOLE > SPLIT:
        is_long = length > WHOLE
        first = tl.where(is_long, low // SPLIT, low // WHOLE)
        return (
            low,
            tl.where(is_long, SPLIT, WHOLE),
            first,
            tl.where(is_long, (length + SPLIT - 1) // SPLIT, (length + WHOLE - 1) // WHOLE),
        )
    else:
        return low, low * 0 + SPLIT, low // SPLIT, (length + SPLIT - 1) // SPLIT


@triton.jit
def splits_each(
    own_splits, lengths, seqs, window, kv_heads, SEQS: tl.constexpr, TOGETHER: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """How many of its sequence's splits a program takes in turn, where a step has more than two for each of TOGETHER
    programs that run at once: what a program begins and ends with takes as long as two or three tiles of keys."""
    other = tl.arange(0, SEQS)
    is_in = other < tl.num_programs(0)
    others = tl.load(lengths + tl.load(seqs + other, mask=is_in, other=0), mask=is_in, other=0)
    _, _, first, past = splits_of(others, window, SPLIT, WHOLE, HAS_WINDOW)
    total = tl.sum(past - first, 0) * kv_heads
    fair = tl.where(total > 2 * TOGETHER, tl.cdiv(total, TOGETHER), 1)
    return tl.maximum(fair, tl.cdiv(own_splits, tl.num_programs(2)))


@triton.jit
def put_part(
    acc, largest, total, parts, marks, base, num_splits, split, GROUP: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """What one split gave its heads, for whoever puts splits together."""
    g, e = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, V_BLOCK)[None, :]
    to = (base + g) * num_splits + split
    tl.store(parts + to * V_DIM + e, acc, mask=(g < GROUP) & (e < V_DIM))
    tl.store(marks + to * 2, largest[:, None], mask=g < GROUP)
    tl.store(marks + to * 2 + 1, total[:, None], mask=g < GROUP)


@triton.jit
def split_kernel(
    q, weight, angles, k, k_weight, v, sinks, slots, keys, values, key_scales, value_scales, table, lengths, seqs,
    tokens, parts, marks, arrivals, out, out_halves, out_marks, q_stride, k_stride, v_stride, table_stride, kv_heads,
    num_splits, eps, k_eps, num_freq, scale, softcap, window, units,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr, SEQS: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_TURNS: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_NEW: tl.constexpr, HAS_HALVES: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """Some splits of one sequence's keys, each by itself, against the GROUP query heads of one key head; the last
    program to finish of those that share a sequence and key head puts their results together.

    A split has SPLIT keys, or all of a sequence that has no more than WHOLE, at least SPLIT. HAS_NEW: the token's own
    key and value come from k and v, and the last split writes them into the cache.
    parts: [sequences, heads, splits, V_DIM]; marks: [sequences, heads, splits, 2] the largest score and Σ exp;
    arrivals: int32 [sequences, key heads], 0 before and after. HAS_TURNS: programs may have several splits, as
    `splits_each` says; SEQS: sequences, up to a power of two.
    """
    wait()
    number, head = tl.program_id(0), tl.program_id(1)
    seq, token = tl.load(seqs + number), tl.load(tokens + number)
    length = tl.load(lengths + seq)
    low, size, first_split, past_split = splits_of(length, window, SPLIT, WHOLE, HAS_WINDOW)
    each = 1
    if HAS_TURNS:
        each = splits_each(
            past_split - first_split, lengths, seqs, window, kv_heads, SEQS, TOGETHER, SPLIT, WHOLE, HAS_WINDOW
        )
    begin = first_split + tl.program_id(2) * each
    past = tl.minimum(begin + each, past_split)
    if begin < past:
        end = tl.minimum(past * size, length)
        g = tl.arange(0, ROWS)[:, None]
        own = read_heads(
            q, token.to(tl.int64) * q_stride + (head * GROUP + g) * DIM, token + g * 0, g < GROUP, weight, eps, angles,
            num_freq, DIM, D_BLOCK, HAS_NORM, ROTATION,
        )  # fmt: skip
        own = multiplied(own, keys)
        own_table = table + seq.to(tl.int64) * table_stride
        cached = end
        if HAS_NEW:  # asked for before anything is computed
            cached = tl.minimum(end, length - 1)
            behind = length - end
            new_key, key_scale, new_value, value_scale = read_new(
                k, k_weight, v, angles, token, head, behind, k_stride, v_stride, k_eps, num_freq, keys, values,
                DIM, D_BLOCK, V_DIM, V_BLOCK, HAS_NORM, ROTATION,
            )  # fmt: skip
            slot = tl.load(slots + token).to(tl.int64)
        row = tl.arange(0, ROWS)  # a sink is in the first split
        has_sink = (row < GROUP) & (row * 0 + begin == first_split)
        largest, total = opened(sinks, head * GROUP + row, has_sink, ROWS, HAS_SINKS)
        acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
        base = (number * kv_heads + head).to(tl.int64) * GROUP
        start = tl.maximum(begin * size, low // TILE * TILE)
        block = block_of(own_table, start + tl.arange(0, TILE), cached, BLOCK)
        for first in tl.range(start, cached, TILE, num_stages=STAGES):
            own_block = block  # known before its keys are asked for, so that several tiles are on their way
            block = block_of(own_table, first + TILE + tl.arange(0, TILE), cached, BLOCK)
            largest, total, acc = add_keys(
                (largest, total, acc), own, keys, values, key_scales, value_scales, own_block, first, low, cached, head,
                kv_heads, scale, softcap, TILE, DIM, D_BLOCK, V_DIM, V_BLOCK, BLOCK, HAS_SOFTCAP,
            )  # fmt: skip
            if HAS_TURNS:
                following = first + TILE
                if (following & (size - 1) == 0) & (following < end):  # the next split begins with nothing
                    put_part(acc, largest, total, parts, marks, base, num_splits, first // size, GROUP, V_DIM, V_BLOCK)
                    largest = tl.full([ROWS], -1e30, tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
        if HAS_NEW:
            slot = tl.where(behind == 0, slot, -1)
            keep(keys, key_scales, new_key, key_scale, slot, head, kv_heads, BLOCK, DIM, D_BLOCK)
            keep(values, value_scales, new_value, value_scale, slot, head, kv_heads, BLOCK, V_DIM, V_BLOCK)
            new_key, new_value = multiplied(new_key, keys), multiplied(new_value, values).to(tl.float32)
            score = tl.sum(own.to(tl.float32) * new_key.to(tl.float32), 1) * (scale * key_scale)
            if HAS_SOFTCAP:
                score = softcap * exponential_tanh(score / softcap)
            score = tl.where(behind == 0, score, float("-inf"))
            new = tl.maximum(largest, score)
            shrink, own_weight = tl.exp(largest - new), tl.exp(score - new)
            total = total * shrink + own_weight
            acc = acc * shrink[:, None] + own_weight[:, None] * (new_value * value_scale[:, None])
            largest = new
        if past_split - first_split == 1:
            write_attended(
                acc, total, out, out_halves, out_marks, token, head, kv_heads, units, GROUP, V_DIM, V_BLOCK,
                HAS_HALVES, IS_FULL,
            )  # fmt: skip
        else:
            put_part(acc, largest, total, parts, marks, base, num_splits, past - 1, GROUP, V_DIM, V_BLOCK)
            tl.debug_barrier()  # all threads have written before one says so
            arrived = tl.atomic_add(arrivals + number * kv_heads + head, past - begin)
            if arrived + past - begin == past_split - first_split:
                tl.store(arrivals + number * kv_heads + head, 0)
                whole, sums = merged(
                    parts, marks, base, first_split, past_split, num_splits, GROUP, HEADS, V_DIM, V_BLOCK, AT_ONCE
                )
                write_attended(
                    whole, sums, out, out_halves, out_marks, token, head, kv_heads, units, GROUP, V_DIM, V_BLOCK,
                    HAS_HALVES, IS_FULL,
                )  # fmt: skip


@triton.jit
def tiles_kernel(
    q, weight, angles, sinks, keys, values, key_scales, value_scales, table, lengths, starts, tile_seqs, tile_firsts,
    out, q_stride, table_stride, heads, kv_heads, eps, num_freq, scale, softcap, window,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of one sequence, one head: causal over the sequence's own keys."""
    wait()
    tile, head = tl.program_id(0), tl.program_id(1)
    seq, first_query = tl.load(tile_seqs + tile), tl.load(tile_firsts + tile)
    start, stop = tl.load(starts + seq), tl.load(starts + seq + 1)
    length = tl.load(lengths + seq)
    row = first_query + tl.arange(0, QUERIES)
    is_row = row < stop - start
    token = (start + row).to(tl.int64)[:, None]
    own_position = length - (stop - start) + row
    own = read_heads(
        q, token * q_stride + head * DIM, token, is_row[:, None], weight, eps, angles, num_freq,
        DIM, D_BLOCK, HAS_NORM, ROTATION,
    )  # fmt: skip
    own = multiplied(own, keys)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - (stop - start) + first_query - window + 1, 0)
    end = tl.minimum(length - (stop - start) + first_query + QUERIES, length)
    largest, total = opened(sinks, head + row * 0, is_row, QUERIES, HAS_SINKS)
    acc = tl.zeros([QUERIES, V_BLOCK], tl.float32)
    for first in range(low // TILE * TILE, end, TILE):
        position = first + tl.arange(0, TILE)
        is_in = (position >= low) & (position < end)
        is_seen = (position[None, :] <= own_position[:, None]) & is_in[None, :]
        if HAS_WINDOW:
            is_seen &= position[None, :] > own_position[:, None] - window
        block = block_of(table + seq.to(tl.int64) * table_stride, position, end, BLOCK)
        some = read_slots(keys, block, position, is_in, head // GROUP, kv_heads, BLOCK, DIM, D_BLOCK)
        at = scales_at(block, position, head // GROUP, kv_heads, BLOCK)
        scores = scores_of(own, some, score_scale(scale, keys, key_scales + at, is_in), softcap, is_seen, HAS_SOFTCAP)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        some = read_slots(values, block, position, is_in, head // GROUP, kv_heads, BLOCK, V_DIM, V_BLOCK)
        none = tl.zeros([QUERIES, V_BLOCK], tl.float32)
        acc = acc * shrink[:, None] + add_values(none, weights, some, values, value_scales + at, is_in)
        largest = new
    e = tl.arange(0, V_BLOCK)[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (token * heads + head) * V_DIM + e, acc, mask=is_row[:, None] & (e < V_DIM))
