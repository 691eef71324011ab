"""A single row of x: codes and its values as bytes, whose products are exact integers.

A value of x is sixteen bits, an upper and a lower byte. A thread multiplies the words of one place of a block; sums
over the four threads of a quad give each a unit, with whose scales it goes on. On the tensor cores, which have eight
columns, a row alone takes half as long again.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.fetch import opened
from pocketllm.engine.backends.cuda.kernels.words import (
    HALVES,
    TABLE,
    K,
    bytes_of,
    dot_bytes,
    four_at,
    look_up_both,
    quad_sum,
)


@triton.jit
def of_two_levels(
    w, v, high, upper_0, lower_0, upper_1, lower_1, zero, t_0, t_1, t_2, t_3,
    S: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Products of unit S: of both halves, or of each."""
    if FORM == TABLE:
        a, b = look_up_both(w[S], t_0, t_1, t_2, t_3, OFFSET != 0)
    else:
        a = bytes_of(w[S], high[S // 2], high[S // 2], t_0, t_1, t_2, t_3, S, 0, FORM)
        b = bytes_of(v[S], high[S // 2], high[S // 2], t_0, t_1, t_2, t_3, S, 1, FORM)
    upper, lower = dot_bytes(a, upper_0[S], zero), dot_bytes(a, lower_0[S], zero)
    if GROUP == 16:
        own = dot_bytes(b, upper_1[S], zero) * 256 + dot_bytes(b, lower_1[S], zero)
        return upper * 256 + lower, own
    else:
        whole = dot_bytes(b, upper_1[S], upper) * 256 + dot_bytes(b, lower_1[S], lower)
        return whole, whole


@triton.jit
def scaled_unit(dot, total, scale, minimum, OFFSET: tl.constexpr, HAS_MIN: tl.constexpr):
    """scale · (dot - offset · total) - minimum · total."""
    value = dot.to(tl.float32)
    if OFFSET != 0:
        value = tl.fma(total, -float(OFFSET), value)
    value *= scale
    if HAS_MIN:
        value = tl.fma(-minimum, total, value)
    return value


@triton.jit
def add_row(
    acc, fetched, scales, x, marks, place, t_0, t_1, t_2, t_3,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """acc + what a thread's unit of one row gives with a single row of x: exact integers up to its scales."""
    w, v, high = fetched
    zero = place & 0
    d_0, e_0 = of_two_levels(w, v, high, *x, zero, t_0, t_1, t_2, t_3, 0, OFFSET, GROUP, FORM)
    d_1, e_1 = of_two_levels(w, v, high, *x, zero, t_0, t_1, t_2, t_3, 1, OFFSET, GROUP, FORM)
    d_2, e_2 = of_two_levels(w, v, high, *x, zero, t_0, t_1, t_2, t_3, 2, OFFSET, GROUP, FORM)
    d_3, e_3 = of_two_levels(w, v, high, *x, zero, t_0, t_1, t_2, t_3, 3, OFFSET, GROUP, FORM)
    total = marks[1]
    if GROUP == 16:
        total = marks[2]
    value = scaled_unit(quad_sum(d_0, d_1, d_2, d_3, place), total, scales[0], scales[1], OFFSET, HAS_MIN)
    if GROUP == 16:
        value += scaled_unit(quad_sum(e_0, e_1, e_2, e_3, place), marks[3], scales[2], scales[3], OFFSET, HAS_MIN)
    return tl.fma(marks[0], value, acc)


@triton.jit
def add_block_to_one(
    acc, w, x, marks, is_in, place, t_0, t_1, t_2, t_3,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add a block of a warp's tile times a single row of x: sums of near and far rows, of each thread's own unit."""
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    near, far = opened(w[2], GROUP, SCALES), opened(w[3], GROUP, SCALES)
    some_x = four_at(x), four_at(x + 4), four_at(x + 8), four_at(x + 12)
    x_scale, total, sum_0, sum_1 = four_at(marks)
    if not IS_EVEN:
        x_scale = tl.where(is_in, x_scale, 0.0)
    some = x_scale, total, sum_0, sum_1
    return (
        add_row(acc[0], w[0], near, some_x, some, place, t_0, t_1, t_2, t_3, OFFSET, GROUP, FORM, has_min),
        add_row(acc[1], w[1], far, some_x, some, place, t_0, t_1, t_2, t_3, OFFSET, GROUP, FORM, has_min),
    )


@triton.jit
def row_of(acc, TILES: tl.constexpr, SHARES: tl.constexpr):
    """Sums over quads and the warps that share rows: [1, rows of the program]."""
    both = tl.reshape(tl.join(acc[0], acc[1]), [SHARES, TILES, 8, 4, 2])
    return tl.reshape(tl.permute(tl.sum(tl.sum(both, 3), 0), (0, 2, 1)), [1, TILES * 16])
