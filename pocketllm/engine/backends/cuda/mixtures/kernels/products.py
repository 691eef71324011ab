"""Rows times matrices of their experts, packed: one row's experts each by itself, several rows by items of one expert.

What a single row's warp reads and computes is as in `single`: 16 rows of a matrix, blocks in turn with the other warps
that share them. A program has two tiles of rows, so that of what a gate lets through it has a whole unit of the next
product's x. Few rows of an expert are multiplied as in `several`.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.codes import table_without_signs
from pocketllm.engine.backends.cuda.kernels.fetch import fetch_tile
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.rows import gated_by, write_bytes
from pocketllm.engine.backends.cuda.kernels.several import add_blocks
from pocketllm.engine.backends.cuda.kernels.single import add_block_to_one, row_of
from pocketllm.engine.backends.cuda.kernels.unpack import half_of_words
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    byte_of,
    scales_of,
    to_float,
)
from pocketllm.engine.backends.cuda.mixtures.kernels.routes import expert_at, routes_of


@triton.jit
def opening_one_kernel(
    x, marks, squares, logits, choice_bias, expert_scale, g_words, g_high, g_scales, g_shared,
    u_words, u_high, u_scales, u_shared, gate_bias, up_bias, chosen, weights, out, out_marks, experts, scale, width,
    eps, slope, limit, t_0, t_1, t_2, t_3,
    units: tl.constexpr, inner: tl.constexpr, out_units: tl.constexpr, SQUARES: tl.constexpr,
    SHARES: tl.constexpr, AHEAD: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, E: tl.constexpr,
    GATING: tl.constexpr, NUM_USED: tl.constexpr, NORMALIZED: tl.constexpr, HAS_CHOICE: tl.constexpr,
    HAS_SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, BEST: tl.constexpr,
    IS_ROUTED: tl.constexpr,
):  # fmt: skip
    """Of a single row and its expert of one rank, 32 values that the gate lets through, as the next product reads them.

    Unless it IS_ROUTED, every program routes the row by itself: that is sooner done than another kernel begins. out:
    [NUM_USED, words].
    """
    blocks: tl.constexpr = units // 4
    turns: tl.constexpr = (blocks + SHARES - 1) // SHARES
    is_even: tl.constexpr = blocks % SHARES == 0
    thread = tl.arange(0, 64 * SHARES)
    warp, lane, place = thread // 32, thread % 32, thread % 4
    share, unit, number = warp // 2, tl.program_id(0), tl.program_id(1)
    wait()
    if IS_ROUTED:
        expert = tl.load(chosen + number)
    else:
        rank, weight = routes_of(
            logits, choice_bias, expert_scale, experts, scale, E, GATING, NUM_USED, NORMALIZED, HAS_CHOICE, HAS_SCALE,
            NUM_GROUPS, GROUPS_USED, BEST,
        )  # fmt: skip
        expert, own = expert_at(rank, weight, number, experts, E)
        if unit == 0:
            tl.store(chosen + number, expert)
            tl.store(weights + number, own)
    value = tl.zeros([1, 32], tl.float32)
    if unit < inner // 32:
        tile = (expert * (inner // 16) + unit * 2 + warp % 2).to(tl.int64)
        g_0 = fetch_tile(g_words, g_high, g_scales, g_shared, tile, share, lane, units, GROUP, FORM, SCALES)
        u_0 = fetch_tile(u_words, u_high, u_scales, u_shared, tile, share, lane, units, GROUP, FORM, SCALES)
        g_1, u_1 = g_0, u_0
        if (AHEAD > 1) and (turns > 1):
            at = share + SHARES
            g_1 = fetch_tile(g_words, g_high, g_scales, g_shared, tile, at, lane, units, GROUP, FORM, SCALES)
            u_1 = fetch_tile(u_words, u_high, u_scales, u_shared, tile, at, lane, units, GROUP, FORM, SCALES)
        zero = tl.zeros([64 * SHARES], tl.float32)
        gate, up = (zero, zero), (zero, zero)
        for turn in tl.static_range(turns):
            g, u, g_0, u_0 = g_0, u_0, g_1, u_1
            if turn + AHEAD < turns:
                at = (turn + AHEAD) * SHARES + share
                g_1 = fetch_tile(g_words, g_high, g_scales, g_shared, tile, at, lane, units, GROUP, FORM, SCALES)
                u_1 = fetch_tile(u_words, u_high, u_scales, u_shared, tile, at, lane, units, GROUP, FORM, SCALES)
            if AHEAD == 1:
                g_0, u_0 = g_1, u_1
            at = turn * SHARES + share
            block = tl.minimum(at, blocks - 1)
            some_x, some_marks = x + block * 64 + place * 16, marks + block * 16 + place * 4
            gate = add_block_to_one(
                gate, g, some_x, some_marks, at < blocks, place, t_0, t_1, t_2, t_3, OFFSET, GROUP, FORM, SCALES,
                is_even,
            )  # fmt: skip
            up = add_block_to_one(
                up, u, some_x, some_marks, at < blocks, place, t_0, t_1, t_2, t_3, OFFSET, GROUP, FORM, SCALES, is_even
            )
        opened, let = row_of(gate, 2, SHARES), row_of(up, 2, SHARES)
        if HAS_FACTOR:
            s = tl.arange(0, SQUARES)
            factor = 1 / tl.sqrt(tl.sum(tl.load(squares + s, mask=s < width // 32, other=0.0), 0) / width + eps)
            opened, let = opened * factor, let * factor
        if HAS_BIAS:
            n = expert * inner + unit * 32 + tl.arange(0, 32)[None, :]
            opened, let = opened + tl.load(gate_bias + n), let + tl.load(up_bias + n)
        value = gated_by(opened, let, slope, limit, GATE)
    # programs past the last unit write the zeros that fill the last block up
    write_bytes(
        out + number * out_units * 16, out_marks + number * out_units * 4, value, unit + tl.arange(0, 1), out_units
    )


@triton.jit
def closing_one_kernel(
    x, marks, chosen, weights, w_words, w_high, w_scales, w_shared, bias, residual, y, next_weight, out, out_marks,
    out_squares, t_0, t_1, t_2, t_3, units: tl.constexpr, rows: tl.constexpr, out_units: tl.constexpr,
    NUM_USED: tl.constexpr, SHARES: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """32 values of y = (residual +) Σ weight · (w[expert] · x[rank] (+ bias)) over a single row's experts.

    The warps that share rows take turns at all blocks of all experts. HAS_NEXT: as `single.finish`.
    """
    works: tl.constexpr = NUM_USED * (units // 4)
    turns: tl.constexpr = (works + SHARES - 1) // SHARES
    is_even: tl.constexpr = works % SHARES == 0
    thread = tl.arange(0, 64 * SHARES)
    warp, lane, place = thread // 32, thread % 32, thread % 4
    share, line = warp // 2, tl.program_id(0)
    own_tile = line * 2 + warp % 2
    wait()
    total = tl.zeros([1, 32], tl.float32)
    if line < rows // 32:
        zero = tl.zeros([64 * SHARES], tl.float32)
        sums = (zero, zero)
        rank = share % NUM_USED
        tile = (tl.load(chosen + rank) * (rows // 16) + own_tile).to(tl.int64)
        w_0 = fetch_tile(w_words, w_high, w_scales, w_shared, tile, share // NUM_USED, lane, units, GROUP, FORM, SCALES)
        w_1 = w_0
        if turns > 1:
            work = share + SHARES
            tile = (tl.load(chosen + work % NUM_USED) * (rows // 16) + own_tile).to(tl.int64)
            w_1 = fetch_tile(
                w_words, w_high, w_scales, w_shared, tile, work // NUM_USED, lane, units, GROUP, FORM, SCALES
            )
        for turn in tl.static_range(turns):
            w, w_0 = w_0, w_1
            if turn + 2 < turns:
                work = (turn + 2) * SHARES + share
                tile = (tl.load(chosen + work % NUM_USED) * (rows // 16) + own_tile).to(tl.int64)
                w_1 = fetch_tile(
                    w_words, w_high, w_scales, w_shared, tile, work // NUM_USED, lane, units, GROUP, FORM, SCALES
                )
            work = turn * SHARES + share
            rank, block = work % NUM_USED, tl.minimum(work // NUM_USED, units // 4 - 1)
            some = add_block_to_one(
                (zero, zero), w, x + (rank * units + block * 4) * 16 + place * 16,
                marks + (rank * units + block * 4) * 4 + place * 4, work < works, place, t_0, t_1, t_2, t_3,
                OFFSET, GROUP, FORM, SCALES, is_even,
            )  # fmt: skip
            weight = tl.load(weights + rank)
            sums = tl.fma(weight, some[0], sums[0]), tl.fma(weight, some[1], sums[1])
        total = row_of(sums, 2, SHARES)
        n = line * 32 + tl.arange(0, 32)[None, :]
        if HAS_BIAS:
            for rank in tl.static_range(NUM_USED):
                total += tl.load(weights + rank) * tl.load(bias + tl.load(chosen + rank) * rows + n)
        if HAS_RESIDUAL:
            total += tl.load(residual + n)
        tl.store(y + n, total)
        if HAS_NEXT:
            tl.store(out_squares + line + tl.arange(0, 1), tl.sum(total * total, 1))
            total *= tl.load(next_weight + n)
    if HAS_NEXT:
        write_bytes(out, out_marks, total, line + tl.arange(0, 1), out_units)


@triton.jit
def few_kernel(
    x, x_sums, x_scales, item_experts, item_counts, num_items, pairs, w_words, w_high, w_scales, w_shared, bias, y,
    last_tile, t_0, t_1, t_2, t_3, units: tl.constexpr, rows: tl.constexpr, tiles: tl.constexpr, N: tl.constexpr,
    WARPS: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] · x (+ bias) for an item's rows, N at most, and 16 · WARPS values of each. tiles: of an
    expert."""
    wait()
    item = tl.program_id(1)
    if item < tl.load(num_items):
        expert, count = tl.load(item_experts + item), tl.load(item_counts + item)
        warp, own = tl.arange(0, 32 * WARPS) // 32, item.to(tl.int64) * (units // 4 * N)
        tile = tl.minimum(expert * tiles + tl.program_id(0) * WARPS + warp, last_tile).to(tl.int64)
        t_0, t_1, t_2, t_3 = table_without_signs(t_0, t_1, t_2, t_3, FORM, OFFSET)
        acc = add_blocks(
            tl.zeros([16 * WARPS, N], tl.float32), x + own * 128, x_sums + own * 16, w_words, w_high, w_scales,
            w_shared, tile, 0, units // 4, t_0, t_1, t_2, t_3, units, WARPS, EACH, STAGES, OFFSET, GROUP, FORM, SCALES,
        )  # fmt: skip
        n = tl.program_id(0) * (16 * WARPS) + tl.arange(0, 16 * WARPS)[:, None]
        m = tl.arange(0, N)[None, :]
        pair = tl.load(pairs + item * N + m, mask=m < count, other=0).to(tl.int64)
        acc *= tl.load(x_scales + item * N + m, mask=m < count, other=0.0)
        if HAS_BIAS:
            acc += tl.load(bias + expert * rows + n, mask=n < rows, other=0.0)
        tl.store(y + pair * rows + n, acc, mask=(m < count) & (n < rows))


@triton.jit
def values_of(
    w, high, own, both, t_0, t_1, t_2, t_3,
    H: tl.constexpr, OFFSET: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Half H of words of rows as float16 values, [rows, words, 4] side by side."""
    four = half_of_words(w, high, (tl.arange(0, w.shape[1]) % 4)[None, :], t_0, t_1, t_2, t_3, H, FORM)
    even, odd = tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3))
    code = tl.reshape(tl.join(even, odd), [w.shape[0], w.shape[1], 4])
    scale, minimum = scales_of(own, both, SCALES)
    value = to_float(code - OFFSET) * scale[:, :, None]
    if (SCALES == HALVES) or (SCALES == K):
        value -= minimum[:, :, None]
    # rounded last: Triton 3.6 cannot have a tensor core's operand in memory in three dimensions
    return tl.reshape(value, [w.shape[0], w.shape[1] * 4]).to(tl.float16)


@triton.jit
def many_kernel(
    x, x_scales, item_experts, item_counts, num_items, pairs, w_words, w_high, w_scales, w_shared, bias, y,
    t_0, t_1, t_2, t_3, units: tl.constexpr, rows: tl.constexpr, tiles: tl.constexpr, EACH: tl.constexpr,
    N: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] · x (+ bias) for an item's EACH rows and N values of each, on the tensor cores.

    Weights are float16 as they are used, as those of other products of prompts are; x as `gather_kernel` gives it.
    """
    wait()
    item = tl.program_id(1)
    if item < tl.load(num_items):
        expert, count = tl.load(item_experts + item), tl.load(item_counts + item)
        m, n, word = tl.arange(0, EACH), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, 16)[None, :]
        own = tl.minimum(n, rows - 1)[:, None]
        tile, r = (expert * tiles + own // TILE).to(tl.int64), own % TILE
        planes: tl.constexpr = 2 if FORM == BYTE else 1
        groups: tl.constexpr = units * 32 // GROUP
        each: tl.constexpr = SHARED_VALUES // 32
        s = r % 8 * 2 + r // 8  # as scales lie
        own_x = x + (item * EACH + m).to(tl.int64)[:, None] * (units * 32) + tl.arange(0, 64)[None, :]
        total = tl.zeros([EACH, N], tl.float32)
        for block in tl.range(0, units // 4):
            of_block = tile * (units // 4) + block
            u = block * 4 + word % 4
            at = (of_block * planes * TILE + r) * 16 + word
            w = tl.load(w_words + at)
            high, both = w, w
            if FORM == NIBBLE_1:
                high = tl.load(w_high + (of_block * TILE + r) * 4 + word // 4)
            if FORM == NIBBLE_2:
                high = tl.load(w_high + ((of_block * TILE + r) * 4 + word // 4) * 2 + word % 4 // 2)
            if (SCALES == K) or (SCALES == SIGNED):
                both = tl.load(w_shared + (tile * tl.cdiv(units, each) + u // each) * TILE + s)
            for half in tl.static_range(2):
                if (FORM == BYTE) and half == 1:
                    w = tl.load(w_words + at + TILE * 16)
                group = u * (32 // GROUP) + half * (32 // GROUP - 1)
                scale = tl.load(w_scales + (tile * groups + group) * TILE + s)
                value = values_of(w, high, scale, both, t_0, t_1, t_2, t_3, half, OFFSET, FORM, SCALES)
                some = tl.load(own_x + block * 128 + half * 64, mask=(m < count)[:, None], other=0.0)
                total = tl.dot(some, tl.trans(value), total)
        pair = tl.load(pairs + item * EACH + m, mask=m < count, other=0).to(tl.int64)
        total *= tl.load(x_scales + item * EACH + m, mask=m < count, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + expert * rows + n, mask=n < rows, other=0.0)[None, :]
        tl.store(y + pair[:, None] * rows + n[None, :], total, mask=(m < count)[:, None] & (n < rows)[None, :])


@triton.jit
def plain_kernel(
    x, item_experts, item_counts, num_items, pairs, w, bias, y, x_stride, rows, width,
    PER_ROW: tl.constexpr, EACH: tl.constexpr, M: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y[pair] = w[expert] · x[pair // PER_ROW] (+ bias) in float32, for an item's rows and 32 values of each."""
    wait()
    item = tl.program_id(1)
    if item < tl.load(num_items):
        expert, count = tl.load(item_experts + item), tl.load(item_counts + item)
        m, i = tl.arange(0, M), tl.arange(0, 32)
        n = tl.program_id(0) * 32 + tl.arange(0, 32)
        pair = tl.load(pairs + item * EACH + m, mask=m < count, other=0).to(tl.int64)
        own_x, own_w = x + (pair // PER_ROW)[:, None] * x_stride, w + (expert.to(tl.int64) * rows + n)[:, None] * width
        total = tl.zeros([M, 32], tl.float32)
        for first in tl.range(0, width, 32):
            at = (first + i)[None, :]
            some_x = tl.load(own_x + at, mask=(m < count)[:, None] & (at < width), other=0.0)
            some_w = tl.load(own_w + at, mask=(n < rows)[:, None] & (at < width), other=0.0).to(tl.float32)
            total += tl.dot(some_x, tl.trans(some_w), input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * rows + n, mask=n < rows, other=0.0)[None, :]
        tl.store(y + pair[:, None] * rows + n[None, :], total, mask=(m < count)[:, None] & (n < rows)[None, :])
