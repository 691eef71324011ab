"""Paged attention: one query a sequence over splits of its keys, and tiles of queries of longer pieces.

Splits and tiles of keys begin at fixed places, so that a row's result does not depend on the step it is in. Softmax in
running form (Dao et al. 2022, arXiv 2205.14135; splits: Dao 2023, "Flash-Decoding").
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.heads import read_heads
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.rows import exponential_tanh, write_units


@triton.jit
def read_keys(
    cache, table, position, is_in, head, heads, BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr
):
    """Keys or values at positions of a sequence, [positions, D_BLOCK]; zeros where is_in is false."""
    block = tl.load(table + position // BLOCK, mask=is_in, other=0)
    slot = block.to(tl.int64) * BLOCK + position % BLOCK
    d = tl.arange(0, D_BLOCK)[None, :]
    at = (slot[:, None] * heads + head) * DIM + d
    return tl.load(cache + at, mask=is_in[:, None] & (d < DIM), other=0.0)


@triton.jit
def scores_of(q, keys, scale, softcap, is_seen, HAS_SOFTCAP: tl.constexpr):
    """Scaled, capped and masked scores, [queries, positions]."""
    scores = tl.dot(q, tl.trans(keys)) * scale
    if HAS_SOFTCAP:
        scores = softcap * exponential_tanh(scores / softcap)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def read_new(
    k, k_weight, v, angles, token, head, k_stride, v_stride, eps, num_freq, keys,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """A token's own key and value of one head as the cache would give them back: [1, D_BLOCK], [1, V_BLOCK]."""
    one = tl.full([1, 1], 0, tl.int64)
    key = read_heads(
        k, one + token.to(tl.int64) * k_stride + head * DIM, one + token, one == 0, k_weight, eps, angles, num_freq,
        DIM, D_BLOCK, HAS_NORM, ROTATION,
    )  # fmt: skip
    e = tl.arange(0, V_BLOCK)[None, :]
    value = tl.load(v + token.to(tl.int64) * v_stride + head * V_DIM + e, mask=e < V_DIM, other=0.0)
    return key.to(keys.dtype.element_ty), value.to(keys.dtype.element_ty)


@triton.jit
def write_new(
    keys, values, key, value, place,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """Put one head's key and value where the cache has them; nowhere where that is below 0."""
    d, e = tl.arange(0, D_BLOCK)[None, :], tl.arange(0, V_BLOCK)[None, :]
    tl.store(keys + place * DIM + d, key, mask=(d < DIM) & (d + place >= d))
    tl.store(values + place * V_DIM + e, value, mask=(e < V_DIM) & (e + place >= e))


@triton.jit
def split_kernel(
    q, weight, angles, k, k_weight, v, slots, keys, values, table, lengths, seqs, tokens, parts, marks,
    q_stride, k_stride, v_stride, table_stride, kv_heads, num_splits, eps, k_eps, num_freq, scale, softcap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's keys against the GROUP query heads of one key head, unnormalized.

    HAS_NEW: the token's own key and value come from k and v, and the last split writes them into the cache. All that
    comes from far away is asked for before anything is computed.
    parts: [sequences, heads, splits, V_DIM]; marks: [sequences, heads, splits, 2] the largest score and Σ exp.
    """
    wait()
    number, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, token = tl.load(seqs + number), tl.load(tokens + number)
    length = tl.load(lengths + seq)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - window, 0)
    end = tl.minimum((split + 1) * SPLIT, length)
    if tl.maximum(split * SPLIT, low) < end:
        position = split * SPLIT + tl.arange(0, SPLIT)
        is_in = (position >= low) & (position < end)
        is_cached = is_in
        if HAS_NEW:
            is_cached = is_in & (position < length - 1)
        own_table = table + seq.to(tl.int64) * table_stride
        some = read_keys(keys, own_table, position, is_cached, head, kv_heads, BLOCK, DIM, D_BLOCK)
        some_values = read_keys(values, own_table, position, is_cached, head, kv_heads, BLOCK, V_DIM, V_BLOCK)
        g = tl.arange(0, ROWS)[:, None]
        own = read_heads(
            q, token.to(tl.int64) * q_stride + (head * GROUP + g) * DIM, token + g * 0, g < GROUP, weight, eps, angles,
            num_freq, DIM, D_BLOCK, HAS_NORM, ROTATION,
        ).to(keys.dtype.element_ty)  # fmt: skip
        scores = scores_of(own, some, scale, softcap, is_cached[None, :], HAS_SOFTCAP)
        largest = tl.max(scores, 1)
        own_score, own_value = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([1, V_BLOCK], tl.float32)
        if HAS_NEW:  # noqa: SIM102  one is known when this is compiled, the other is not
            if end == length:
                new_key, new_value = read_new(
                    k, k_weight, v, angles, token, head, k_stride, v_stride, k_eps, num_freq, keys,
                    DIM, D_BLOCK, V_DIM, V_BLOCK, HAS_NORM, ROTATION,
                )  # fmt: skip
                place = tl.load(slots + token).to(tl.int64) * kv_heads + head
                write_new(keys, values, new_key, new_value, place, DIM, D_BLOCK, V_DIM, V_BLOCK)
                own_score = tl.sum(own.to(tl.float32) * new_key.to(tl.float32), 1) * scale
                if HAS_SOFTCAP:
                    own_score = softcap * exponential_tanh(own_score / softcap)
                own_value = new_value.to(tl.float32)
        largest = tl.maximum(largest, own_score)
        weights, own_weight = tl.exp(scores - largest[:, None]), tl.exp(own_score - largest)
        total = tl.sum(weights, 1) + own_weight
        acc = tl.dot(weights.to(some_values.dtype), some_values) + own_weight[:, None] * own_value
        e = tl.arange(0, V_BLOCK)[None, :]
        to = ((number * kv_heads + head) * GROUP + g) * num_splits + split
        tl.store(parts + to * V_DIM + e, acc, mask=(g < GROUP) & (e < V_DIM))
        tl.store(marks + to * 2, largest[:, None], mask=g < GROUP)
        tl.store(marks + to * 2 + 1, total[:, None], mask=g < GROUP)


@triton.jit
def merge_kernel(
    parts, marks, lengths, seqs, tokens, out, out_halves, out_marks, heads, num_splits, window, units,
    V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_HALVES: tl.constexpr, IS_FULL: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """Put a head's splits together, AT_ONCE at a time: out [tokens, heads, V_DIM], and what the next product reads.

    An empty sequence has no row. IS_FULL: all heads together fill whole blocks of units.
    """
    wait()
    number, head = tl.program_id(0), tl.program_id(1)
    seq, token = tl.load(seqs + number), tl.load(tokens + number)
    length = tl.load(lengths + seq)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - window, 0)
    e = tl.arange(0, V_BLOCK)
    base = (number * heads + head) * num_splits
    each = tl.arange(0, SPLITS)
    is_seen = (each >= low // SPLIT) & (each * SPLIT < length)
    largest = tl.max(tl.load(marks + (base + each) * 2, mask=is_seen, other=float("-inf")), 0)
    total = 0.0
    acc = tl.zeros([V_BLOCK], tl.float32)
    # from a fixed place on: the order of sums is a row's own
    for first in range(low // SPLIT // AT_ONCE * AT_ONCE, tl.cdiv(length, SPLIT), AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        is_in = (split >= low // SPLIT) & (split * SPLIT < length)
        weights = tl.exp(tl.load(marks + (base + split) * 2, mask=is_in, other=float("-inf")) - largest)
        sums = tl.load(marks + (base + split) * 2 + 1, mask=is_in, other=0.0)
        is_part = is_in[:, None] & (e < V_DIM)[None, :]
        some = tl.load(parts + (base + split)[:, None] * V_DIM + e[None, :], mask=is_part, other=0.0)
        total += tl.sum(weights * sums, 0)
        acc += tl.sum(weights[:, None] * some, 0)
    to = out + (token.to(tl.int64) * heads + head) * V_DIM + e
    acc = acc / tl.maximum(total, 1e-30)
    tl.store(to, acc, mask=(e < V_DIM) & (e * 0 + length > 0))
    if HAS_HALVES:
        lines: tl.constexpr = V_DIM // 32
        line = head * lines + tl.arange(0, lines)
        line = tl.where(length > 0, line, units)  # an empty sequence has no row: its token is another's
        write_units(out_halves, out_marks, tl.reshape(acc, [lines, 32]), token + line * 0, line, units, IS_ONE)
        if not IS_FULL:  # zeros up to the end of the last block
            after = heads * lines + tl.arange(0, 4)
            after = tl.where((head == heads - 1) & (length > 0), after, units)
            write_units(out_halves, out_marks, tl.zeros([4, 32], tl.float32), token + after * 0, after, units, IS_ONE)


@triton.jit
def tiles_kernel(
    q, weight, angles, keys, values, table, lengths, starts, tile_seqs, tile_firsts, out,
    q_stride, table_stride, heads, kv_heads, eps, num_freq, scale, softcap, window,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
    ).to(keys.dtype.element_ty)  # fmt: skip
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - (stop - start) + first_query - window + 1, 0)
    end = tl.minimum(length - (stop - start) + first_query + QUERIES, length)
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, V_BLOCK], tl.float32)
    for first in range(low // TILE * TILE, end, TILE):
        position = first + tl.arange(0, TILE)
        is_in = (position >= low) & (position < end)
        is_seen = (position[None, :] <= own_position[:, None]) & is_in[None, :]
        if HAS_WINDOW:
            is_seen &= position[None, :] > own_position[:, None] - window
        own_table = table + seq.to(tl.int64) * table_stride
        some = read_keys(keys, own_table, position, is_in, head // GROUP, kv_heads, BLOCK, DIM, D_BLOCK)
        scores = scores_of(own, some, scale, softcap, is_seen, HAS_SOFTCAP)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        some = read_keys(values, own_table, position, is_in, head // GROUP, kv_heads, BLOCK, V_DIM, V_BLOCK)
        acc = acc * shrink[:, None] + tl.dot(weights.to(some.dtype), some)
        largest = new
    e = tl.arange(0, V_BLOCK)[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (token * heads + head) * V_DIM + e, acc, mask=is_row[:, None] & (e < V_DIM))
