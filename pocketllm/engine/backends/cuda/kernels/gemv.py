"""One row times a packed matrix: every weight is read once.

Products are exact integers: the row is int8 with a scale for each unit of 32 values, as the codes of a matrix are. A
thread works by itself: tensors have one element for each thread. Of four rows of the matrix a thread multiplies the
words of one place of a block; sums over the four threads of a quad give each a unit, with whose scales it goes on.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.rows import write_bytes
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    bytes_of,
    dot_bytes,
    load_four,
    load_two,
    quad_sum,
    scales_of,
    to_float,
)
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS, UNIT
from pocketllm.engine.backends.cuda.packing import Packed, units_of

LANES = 32
MANY_ROWS = 16384
"""From here on there are warps enough without two of them sharing a row."""


@dataclass
class Next:
    """What is handed on beside y where a norm follows: y · weight as int8, and Σ y² of each 32 values."""

    weight: Tensor
    words: Tensor
    marks: Tensor
    squares: Tensor


@dataclass(frozen=True)
class Factor:
    """1 / sqrt(mean(x²) + eps) of a row whose bytes were made without it; squares: Σ x² of each 32 values."""

    squares: Tensor
    eps: float


@triton.jit
def unit_dots(w, high, second, x_low, x_high, place, t_0, t_1, t_2, t_3, GROUP: tl.constexpr, FORM: tl.constexpr):
    """Products of a row's words (four units, a second four of bytes) with x; of 16-value groups each half's."""
    zero = place & 0
    a_0 = dot_bytes(bytes_of(w[0], high, second, t_0, t_1, t_2, t_3, 0, 0, FORM), x_low[0], zero)
    a_1 = dot_bytes(bytes_of(w[1], high, second, t_0, t_1, t_2, t_3, 1, 0, FORM), x_low[1], zero)
    a_2 = dot_bytes(bytes_of(w[2], high, second, t_0, t_1, t_2, t_3, 2, 0, FORM), x_low[2], zero)
    a_3 = dot_bytes(bytes_of(w[3], high, second, t_0, t_1, t_2, t_3, 3, 0, FORM), x_low[3], zero)
    b_0, b_1, b_2, b_3 = a_0, a_1, a_2, a_3
    if GROUP == 16:
        b_0, b_1, b_2, b_3 = zero, zero, zero, zero
    b_0 = dot_bytes(bytes_of(w[4], high, second, t_0, t_1, t_2, t_3, 0, 1, FORM), x_high[0], b_0)
    b_1 = dot_bytes(bytes_of(w[5], high, second, t_0, t_1, t_2, t_3, 1, 1, FORM), x_high[1], b_1)
    b_2 = dot_bytes(bytes_of(w[6], high, second, t_0, t_1, t_2, t_3, 2, 1, FORM), x_high[2], b_2)
    b_3 = dot_bytes(bytes_of(w[7], high, second, t_0, t_1, t_2, t_3, 3, 1, FORM), x_high[3], b_3)
    second_sum = quad_sum(b_0, b_1, b_2, b_3, place)
    if GROUP == 16:
        return quad_sum(a_0, a_1, a_2, a_3, place), second_sum
    else:
        return second_sum, second_sum


@triton.jit
def fetch_row(w_words, w_high, row, u, units: tl.constexpr, FORM: tl.constexpr):
    """A thread's words of one row, and what holds their upper bits."""
    planes: tl.constexpr = 2 if FORM == BYTE else 1
    at = row * (units * 4 * planes) + u * 4
    w_0, w_1, w_2, w_3 = load_four(w_words, at)
    v_0, v_1, v_2, v_3 = w_0, w_1, w_2, w_3
    if FORM == BYTE:
        v_0, v_1, v_2, v_3 = load_four(w_words, at + units * 4)
    high, second = w_0, w_0
    if FORM == NIBBLE_1:
        high = tl.load(w_high + row * units + u)
    if FORM == NIBBLE_2:
        high, second = load_two(w_high, (row * units + u) * 2)
    return (w_0, w_1, w_2, w_3, v_0, v_1, v_2, v_3), high, second


@triton.jit
def fetch_scales(w_scales, w_shared, tile, u, units: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """What memory has of the scales of a unit's groups, of each of a tile's four rows."""
    groups: tl.constexpr = units * 32 // GROUP
    at = (tile * groups + u * (32 // GROUP)) * TILE
    first = load_four(w_scales, at)
    last = first
    if GROUP == 16:
        last = load_four(w_scales, at + TILE)
    both = first
    if (SCALES == K) or (SCALES == SIGNED):
        each: tl.constexpr = SHARED_VALUES // 32
        both = load_four(w_shared, (tile * tl.cdiv(units, each) + u // each) * TILE)
    return first, last, both


@triton.jit
def within(u, units: tl.constexpr, STRIDE: tl.constexpr):
    """u, and past the last unit that one again: no load needs a mask."""
    if units % STRIDE != 0:
        u = tl.minimum(u, units - 1)
    return u


@triton.jit
def fetch_tile(
    w_words, w_high, w_scales, w_shared, tile, u, units: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A thread's part of a tile's four rows."""
    return (
        fetch_row(w_words, w_high, tile * TILE, u, units, FORM),
        fetch_row(w_words, w_high, tile * TILE + 1, u, units, FORM),
        fetch_row(w_words, w_high, tile * TILE + 2, u, units, FORM),
        fetch_row(w_words, w_high, tile * TILE + 3, u, units, FORM),
        fetch_scales(w_scales, w_shared, tile, u, units, GROUP, SCALES),
    )


@triton.jit
def add_row(
    acc, fetched, x, place, t_0, t_1, t_2, t_3,
    R: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """acc + what the words of row R of a tile give with x (`fetch_x`); fused multiply-adds are written out."""
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    w, high, second = fetched[R]
    first, last, both = fetched[4]
    x_low, x_high, x_scale, total, sum_0, sum_1 = x
    dot, second_dot = unit_dots(w, high, second, x_low, x_high, place, t_0, t_1, t_2, t_3, GROUP, FORM)
    scale, minimum = scales_of(first[R], both[R], SCALES)
    if GROUP == 16:
        total = sum_0
    value = scale * less_offset(dot, total, OFFSET)
    if has_min:
        value = tl.fma(-minimum, total, value)
    if GROUP == 16:
        scale, minimum = scales_of(last[R], both[R], SCALES)
        value = tl.fma(scale, less_offset(second_dot, sum_1, OFFSET), value)
        if has_min:
            value = tl.fma(-minimum, sum_1, value)
    return tl.fma(x_scale, value, acc)


@triton.jit
def less_offset(dot, total, OFFSET: tl.constexpr):
    """dot - OFFSET · total as a float32, exactly."""
    value = to_float(dot)
    if OFFSET != 0:
        value = tl.fma(total, -float(OFFSET), value)
    return value


@triton.jit
def fetch_x(x, marks, own, units: tl.constexpr, STRIDE: tl.constexpr):
    """Words of both halves of a block's units at a thread's place; scale and sums of the thread's own unit."""
    u = within(own, units, STRIDE)
    x_low, x_high = load_four(x, u * 4), load_four(x, units * 4 + u * 4)
    scale, total, sum_0, sum_1 = load_four(marks, u * 4)
    if units % STRIDE != 0:
        scale = tl.where(own < units, scale, 0.0)
    return x_low, x_high, scale, total, sum_0, sum_1


@triton.jit
def gemv_kernel(
    x, marks, w_words, w_high, w_scales, w_shared, y, bias, residual, squares, next_weight, next_words, next_marks,
    next_squares, rows, tiles, width, eps, t_0, t_1, t_2, t_3,
    units: tl.constexpr, next_width: tl.constexpr, next_units: tl.constexpr, SQUARES: tl.constexpr,
    OFFSET: tl.constexpr, TILES: tl.constexpr, SHARES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """y[n] = (factor ·) Σ w[n] · x (+ bias[n]) (+ residual[n]) for TILES tiles of four rows n, SHARES warps for each.

    Two steps of weights are under way while a third is multiplied: memory is the limit, and it is far away.
    """
    threads: tl.constexpr = 32 * TILES * SHARES
    thread = tl.arange(0, threads)
    warp, lane = thread // 32, thread % 32
    tile = tl.minimum(tl.program_id(0) * TILES + warp % TILES, tiles - 1).to(tl.int64)
    own, place = (warp // TILES * 32 + lane).to(tl.int64), lane % 4
    stride: tl.constexpr = 32 * SHARES
    acc_0 = tl.zeros([threads], tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    u = within(own, units, stride)
    now = fetch_tile(w_words, w_high, w_scales, w_shared, tile, u, units, GROUP, FORM, SCALES)
    soon = now
    if stride < units:
        u = within(own + stride, units, stride)
        soon = fetch_tile(w_words, w_high, w_scales, w_shared, tile, u, units, GROUP, FORM, SCALES)
    wait()
    for begin in tl.static_range(0, units, stride):
        some_x = fetch_x(x, marks, begin + own, units, stride)
        later = soon
        if begin + 2 * stride < units:
            u = within(begin + 2 * stride + own, units, stride)
            later = fetch_tile(w_words, w_high, w_scales, w_shared, tile, u, units, GROUP, FORM, SCALES)
        acc_0 = add_row(acc_0, now, some_x, place, t_0, t_1, t_2, t_3, 0, OFFSET, GROUP, FORM, SCALES)
        acc_1 = add_row(acc_1, now, some_x, place, t_0, t_1, t_2, t_3, 1, OFFSET, GROUP, FORM, SCALES)
        acc_2 = add_row(acc_2, now, some_x, place, t_0, t_1, t_2, t_3, 2, OFFSET, GROUP, FORM, SCALES)
        acc_3 = add_row(acc_3, now, some_x, place, t_0, t_1, t_2, t_3, 3, OFFSET, GROUP, FORM, SCALES)
        now, soon = soon, later
    four = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))
    sums_of = tl.sum(tl.sum(tl.reshape(four, [SHARES, TILES, 32, TILE]), 2), 0)
    result = tl.reshape(sums_of, [TILES * TILE])
    n = tl.program_id(0) * (TILES * TILE) + tl.arange(0, TILES * TILE)
    is_row = n < rows
    if HAS_FACTOR:
        s = tl.arange(0, SQUARES)
        total = tl.sum(tl.load(squares + s, mask=s < width // 32, other=0.0), 0)
        result *= 1 / tl.sqrt(total / width + eps)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=is_row, other=0.0)
    if HAS_RESIDUAL:
        result += tl.load(residual + n, mask=is_row, other=0.0)
    tl.store(y + n, result, mask=is_row)
    if HAS_NEXT:
        tl.store(next_squares + tl.program_id(0), tl.sum(result * result, 0))
        line = tl.program_id(0) + tl.zeros([1], tl.int32)
        normed = tl.reshape(result * tl.load(next_weight + n), [1, 32])
        write_bytes(next_words, next_marks, normed, 0, line, next_units, False)
        if next_units * 32 != next_width:  # zeros up to the end of the last block
            after = next_width // 32 + tl.arange(0, 4)
            after = tl.where(tl.program_id(0) == next_width // 32 - 1, after, next_units)
            write_bytes(next_words, next_marks, tl.zeros([4, 32], tl.float32), 0, after, next_units, False)


def multiply(
    x: Tensor,
    marks: Tensor,
    packed: Packed,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    factor: Factor | None = None,
    following: Next | None = None,
    shape: tuple[int, int] | None = None,
) -> None:
    """y = (factor ·) x · weightᵀ (+ bias) (+ residual), all of one row.

    x: int32, the int8 of `rows.write_bytes` in words of four; marks: float32, of each unit its scale, its sum and its
    halves' sums; y, residual: float32 [rows]. following: also y for a product behind a norm; its rows are whole units.
    shape: tiles of a program, and warps for each.
    """
    layout, tiles = packed.layout, len(packed.scales)
    per_program, shares = shape or shape_for(packed)
    if following is not None:
        per_program = UNIT // TILE_ROWS
    squares = y if factor is None else factor.squares
    gemv_kernel[(-(-tiles // per_program),)](
        x, marks, packed.words, packed.high, packed.scales, packed.shared,
        y, y if bias is None else bias, y if residual is None else residual, squares,
        *((y, x, marks, y) if following is None
          else (following.weight, following.words, following.marks, following.squares)),
        packed.rows, tiles, packed.cols, 0.0 if factor is None else factor.eps, *layout.packed_table,
        units=packed.units, next_width=packed.rows, next_units=units_of(packed.rows),
        SQUARES=triton.next_power_of_2(max(1, packed.cols // UNIT)) if factor is not None else 1,
        OFFSET=layout.offset, TILES=per_program, SHARES=shares, GROUP=layout.group, FORM=int(layout.form),
        SCALES=int(layout.scales), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_FACTOR=factor is not None, HAS_NEXT=following is not None,
        num_warps=per_program * shares, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip


def shape_for(packed: Packed) -> tuple[int, int]:
    """Tiles of a program and warps for each, as they were fastest on an H200."""
    return (4, 1) if packed.rows >= MANY_ROWS or packed.units <= LANES else (8, 2)
