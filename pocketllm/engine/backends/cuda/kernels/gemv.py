"""Few rows times a packed matrix: every weight is read once.

Products are exact integers: rows of x are int8 with a scale for each 32 values, as the codes of a matrix are.
"""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels import words
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.words import HALVES, K, bytes_of, dot_bytes, group_scales, to_float
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed

MAX_ROWS = 8
"""Rows of x in one launch; more are taken in turns."""
FEW_GROUPS, MANY_ROWS = 128, 16384
"""With no more groups and no fewer rows than these, one warp is faster than two. A thread works on one group of each
row of a tile, so that rows of x and scales stay in its registers."""
X_GROUP = 32
"""Values of x that share a scale."""


@triton.jit
def halves(x):
    """Even and odd entries of the last of four dimensions."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3] // 2, 2]))


@triton.jit
def dot_1(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORD: tl.constexpr, PARTS: tl.constexpr,
          FORM: tl.constexpr, WANTS_TOTAL: tl.constexpr):  # fmt: skip
    """sums + products of one word of each group with parts of x, total + those parts; w, x: [rows, rows, groups, 1]."""
    w = tl.reshape(w, [w.shape[0], w.shape[1], w.shape[2]])
    x_0 = tl.reshape(x_0, [x_0.shape[0], x_0.shape[1], x_0.shape[2]])
    sums = dot_bytes(bytes_of(w, high, WORD, t_0, t_1, t_2, t_3, 0, FORM), x_0, sums)
    if WANTS_TOTAL:
        total = dot_bytes(x_0 * 0 + 0x01010101, x_0, total)
    if PARTS == 2:
        x_1 = tl.reshape(x_1, [x_1.shape[0], x_1.shape[1], x_1.shape[2]])
        sums = dot_bytes(bytes_of(w, high, WORD, t_0, t_1, t_2, t_3, 1, FORM), x_1, sums)
        if WANTS_TOTAL:
            total = dot_bytes(x_1 * 0 + 0x01010101, x_1, total)
    return sums, total


@triton.jit
def dot_2(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORD: tl.constexpr, STEP: tl.constexpr,
          PARTS: tl.constexpr, FORM: tl.constexpr, WANTS_TOTAL: tl.constexpr):  # fmt: skip
    """The same for words WORD and WORD + STEP, one after another, so that few sums are alive."""
    w, w_odd = halves(w)
    x_0, x_0_odd = halves(x_0)
    x_1, x_1_odd = halves(x_1)
    sums, total = dot_1(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORD, PARTS, FORM, WANTS_TOTAL)
    return dot_1(w_odd, high, x_0_odd, x_1_odd, sums, total, t_0, t_1, t_2, t_3, WORD + STEP, PARTS, FORM, WANTS_TOTAL)


@triton.jit
def dot_4(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORD: tl.constexpr, STEP: tl.constexpr,
          PARTS: tl.constexpr, FORM: tl.constexpr, WANTS_TOTAL: tl.constexpr):  # fmt: skip
    """The same for four words from WORD on."""
    w, w_odd = halves(w)
    x_0, x_0_odd = halves(x_0)
    x_1, x_1_odd = halves(x_1)
    sums, total = dot_2(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORD, 2 * STEP, PARTS, FORM, WANTS_TOTAL)
    return dot_2(
        w_odd, high, x_0_odd, x_1_odd, sums, total, t_0, t_1, t_2, t_3, WORD + STEP, 2 * STEP, PARTS, FORM, WANTS_TOTAL
    )


@triton.jit
def dot_group(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, WORDS: tl.constexpr, PARTS: tl.constexpr,
              FORM: tl.constexpr, WANTS_TOTAL: tl.constexpr):  # fmt: skip
    """The same for all words of each group."""
    if WORDS == 2:
        return dot_2(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, 0, 1, PARTS, FORM, WANTS_TOTAL)
    elif WORDS == 4:
        return dot_4(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, 0, 1, PARTS, FORM, WANTS_TOTAL)
    else:
        w, w_odd = halves(w)
        x_0, x_0_odd = halves(x_0)
        x_1, x_1_odd = halves(x_1)
        sums, total = dot_4(w, high, x_0, x_1, sums, total, t_0, t_1, t_2, t_3, 0, 2, PARTS, FORM, WANTS_TOTAL)
        return dot_4(w_odd, high, x_0_odd, x_1_odd, sums, total, t_0, t_1, t_2, t_3, 1, 2, PARTS, FORM, WANTS_TOTAL)


@triton.jit
def fetch(
    w_words, w_high, w_scales, w_shared, tile, first,
    groups: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, PER_SHARED: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Words, high bits, scales and minimums of a tile of rows, from group `first` on; past the end, the last again."""
    g = tl.minimum(first + tl.arange(0, GROUPS), groups - 1)
    r = tl.arange(0, TILE)
    first_row = (tile * TILE).to(tl.int64) * groups
    at = r[None, :, None, None] * groups + g[None, None, :, None]
    w = tl.load(w_words + first_row * WORDS + at * WORDS + tl.arange(0, WORDS)[None, None, None, :])
    high = tl.zeros([1, 1, 1], tl.int32)
    if (FORM == words.NIBBLE_1) or (FORM == words.NIBBLE_2):
        high = tl.load(w_high + first_row + r[None, :, None] * groups + g[None, None, :])
    scale, minimum = group_scales(
        w_scales + first_row, w_shared + first_row // PER_SHARED, g[None, None, :] * TILE + r[None, :, None],
        (g[None, None, :] // PER_SHARED) * TILE + r[None, :, None], SCALES,
    )  # fmt: skip
    return w, high, scale, minimum


@triton.jit
def gemv_kernel(
    x, x_scales, w_words, w_high, w_scales, w_shared, y, bias, residual, x_rows, y_stride, residual_stride, rows,
    t_0, t_1, t_2, t_3,
    groups: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, PER_SHARED: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] (+ bias[n]) (+ residual[m, n]) for a tile of rows n and ROWS rows m.

    Dimensions: rows of x, rows of the matrix, groups, words of a group. Past the last group and the last row of x, the
    last one is read again: no load needs a mask. Fused multiply-adds are written out, so that every number of rows
    gets the same ones.
    """
    tile = tl.program_id(0)
    group: tl.constexpr = 4 * WORDS * PARTS
    m = tl.minimum(tl.arange(0, ROWS), x_rows - 1)
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    wants_total: tl.constexpr = has_min or OFFSET != 0
    acc = tl.zeros([ROWS, TILE, GROUPS], tl.float32)
    w, high, scale, minimum = fetch(
        w_words, w_high, w_scales, w_shared, tile, 0, groups, TILE, GROUPS, WORDS, PER_SHARED, FORM, SCALES
    )
    wait()
    for first in tl.range(0, groups, GROUPS, loop_unroll_factor=UNROLL):
        next_w, next_high, next_scale, next_minimum = fetch(
            w_words, w_high, w_scales, w_shared, tile, first + GROUPS, groups, TILE, GROUPS, WORDS, PER_SHARED, FORM,
            SCALES,
        )  # fmt: skip
        own = first + tl.arange(0, GROUPS)
        g = tl.minimum(own, groups - 1)
        i = tl.arange(0, WORDS)[None, None, None, :]
        x_at = m[:, None, None, None] * (groups * group // 4) + g[None, None, :, None] * (group // 4) + i
        x_0 = tl.load(x + x_at)
        x_1 = x_0
        if PARTS == 2:
            x_1 = tl.load(x + x_at + WORDS)
        x_scale = tl.load(x_scales + m[:, None, None] * (groups * group // 32) + g[None, None, :] * group // 32)
        sums, total = dot_group(
            w, high, x_0, x_1, tl.zeros([ROWS, TILE, GROUPS], tl.int32), tl.zeros([ROWS, 1, GROUPS], tl.int32),
            t_0, t_1, t_2, t_3, WORDS, PARTS, FORM, wants_total,
        )  # fmt: skip
        if OFFSET != 0:
            sums -= OFFSET * total
        value = scale * to_float(sums)
        if has_min:
            value = tl.fma(-minimum, to_float(total), value)
        if groups % GROUPS != 0:
            value = tl.where(own[None, None, :] < groups, value, 0.0)
        acc = tl.fma(x_scale, value, acc)
        w, high, scale, minimum = next_w, next_high, next_scale, next_minimum
    out_n = tile * TILE + tl.arange(0, TILE)[None, :]
    out_m = tl.arange(0, ROWS)[:, None]
    is_out = (out_n < rows) & (out_m < x_rows)
    result = tl.sum(acc, 2)
    if HAS_BIAS:
        result += tl.load(bias + out_n, mask=out_n < rows, other=0)
    if HAS_RESIDUAL:
        result += tl.load(residual + out_m * residual_stride + out_n, mask=is_out, other=0)
    tl.store(y + out_m * y_stride + out_n, result, mask=is_out)


def multiply(
    x: Tensor,
    x_scales: Tensor,
    packed: Packed,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    num_warps: int | None = None,
) -> None:
    """y = x · weightᵀ (+ bias) (+ residual), MAX_ROWS rows at a time.

    x: int8 in words of four, int32 [tokens, cols / 4]; x_scales: float32 [tokens, cols / 32]; both contiguous.
    y, residual: float32 [tokens, rows].
    """
    layout, groups = packed.layout, packed.scales.shape[1]
    num_warps = num_warps or (1 if groups <= FEW_GROUPS and packed.rows >= MANY_ROWS else 2)
    per_shared = 1 if packed.shared.ndim == 1 else groups // packed.shared.shape[1]
    table = layout.packed_table
    for at in range(0, len(x), MAX_ROWS):
        count = min(MAX_ROWS, len(x) - at)
        out = y[at : at + count]
        added = None if residual is None else residual[at : at + count]
        gemv_kernel[(len(packed.scales),)](
            x[at : at + count], x_scales[at : at + count], packed.words, packed.high, packed.scales, packed.shared,
            out, out if bias is None else bias, out if added is None else added,
            count, out.stride(0), 0 if added is None else added.stride(0), packed.rows, *table,
            groups=groups, OFFSET=layout.offset, ROWS=triton.next_power_of_2(count), TILE=TILE_ROWS,
            GROUPS=32 * num_warps, WORDS=layout.words, PARTS=layout.parts, PER_SHARED=per_shared,
            FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None,
            HAS_RESIDUAL=added is not None,
            UNROLL=-(-groups // (32 * num_warps)) if count == 1 else 1, enable_fp_fusion=False, num_warps=num_warps,
            **OPTIONS,
        )  # fmt: skip
