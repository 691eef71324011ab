"""A few rows times a matrix of plain floats, each weight read once for eight rows and summed in float32.

A thread works by itself, as in `single`: it has sixteen bytes of a matrix's row at a time, widens them in registers and
multiplies them with float32 values of each row of x, one sum for each pair of rows. A warp has `ROWS` rows of the
matrix; warps of a program have others, so that they read the same values of x at about the same time, or share rows
where these are few. How many share is the matrix's alone, and a thread adds column after column: a row of x has the
same sums whatever rows are beside it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait

MOST = 8
"""Rows of x that one program takes; more are further programs, which find the matrix's rows in the cache."""
ROWS = 4
"""Of the matrix, that a warp has at once."""
WARPS = 4
"""Of a program."""
SOME_ROWS, MANY_ROWS = 4096, 8192
"""From here on two warps share rows of a matrix, and none: there are some sixteen for each of 132 multiprocessors."""


@triton.jit
def both_of(pairs):
    """[threads, 2 · n] → [threads, n] of even places and of odd ones."""
    return tl.split(tl.reshape(pairs, [pairs.shape[0], pairs.shape[1] // 2, 2]))


@triton.jit
def four_of(values):
    """[threads, 4] → four of one for each thread."""
    even, odd = both_of(values)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def eight_of(values):
    """[threads, 8] → eight of one for each thread."""
    even, odd = both_of(values)
    a, b = four_of(even), four_of(odd)
    return a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]


@triton.jit
def both(values, others):
    """One tuple behind another."""
    return values + others


@triton.jit
def fetch(w, row, last_row, column, width: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr):
    """EACH values from `column` on of ROWS rows from `row` on, for each thread, as they lie; zeros past the width."""
    parts = ()
    e = tl.arange(0, EACH)[None, :]
    for number in tl.static_range(ROWS):
        own = w + tl.minimum(row + number, last_row).to(tl.int64) * width + column
        # of whole steps a thread has all values or none
        is_in = (column < width)[:, None] & (e >= 0) if width % EACH == 0 else column[:, None] + e < width
        parts = both(parts, (tl.load(own[:, None] + e, mask=is_in, other=0.0, eviction_policy="evict_first"),))
    return parts


@triton.jit
def widened(values):
    """Values of each thread as float32, one after another."""
    wide = values.to(tl.float32)
    if values.shape[1] == 8:
        return eight_of(wide)
    else:
        return four_of(wide)


@triton.jit
def four_from(x, column, width: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Four values of a row of x."""
    at = column[:, None] + tl.arange(0, 4)[None, :]
    return four_of(tl.load(x + at) if IS_WHOLE else tl.load(x + at, mask=at < width, other=0.0))


@triton.jit
def x_of(x, column, width: tl.constexpr, EACH: tl.constexpr, IS_WHOLE: tl.constexpr):
    """EACH values of a row of x from `column` on, for each thread; zeros past the width."""
    some = four_from(x, column, width, IS_WHOLE)
    return some + four_from(x, column + 4, width, IS_WHOLE) if EACH == 8 else some


@triton.jit
def add_columns(sums, w, x, x_stride, first, last, column, width: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
                EACH: tl.constexpr, IS_WHOLE: tl.constexpr):  # fmt: skip
    """sums + a thread's columns: of row m of x and row r of the matrix at m · ROWS + r."""
    wide = ()
    for r in tl.static_range(ROWS):
        wide = both(wide, widened(w[r]))
    added = ()
    for m in tl.static_range(M):
        some = x_of(x + tl.minimum(first + m, last).to(tl.int64) * x_stride, column, width, EACH, IS_WHOLE)
        for r in tl.static_range(ROWS):
            total = sums[m * ROWS + r]
            for e in tl.static_range(EACH):
                total = tl.fma(wide[r * EACH + e], some[e], total)
            added = both(added, (total,))
    return added


@triton.jit
def joined(values, COUNT: tl.constexpr):
    """As many tensors [threads], a power of two, as one [threads, COUNT]."""
    left = values
    for level in tl.static_range(6):
        if COUNT >> level > 1:
            pairs = ()
            for number in tl.static_range(COUNT >> (level + 1)):
                pairs = both(pairs, (tl.join(left[number], left[number + (COUNT >> (level + 1))]),))
            left = pairs
    return tl.reshape(left[0], [values[0].shape[0], COUNT])


@triton.jit
def plain_kernel(
    x, w, y, bias, residual, x_rows, x_stride, y_stride, residual_stride, rows, width: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, SHARES: tl.constexpr, EACH: tl.constexpr,
    AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] (+ bias[n]) (+ residual[m, n]) for M rows m, and ROWS rows n for each SHARES warps.

    Weights of AHEAD steps are under way while one is multiplied.
    """
    step: tl.constexpr = 32 * EACH * SHARES
    is_whole: tl.constexpr = width % (step * AHEAD) == 0
    groups: tl.constexpr = WARPS // SHARES
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    first = tl.program_id(0) * M
    row = (tl.program_id(1) * groups + warp // SHARES) * ROWS
    own = (warp % SHARES * 32 + lane) * EACH
    w_0 = fetch(w, row, rows - 1, own, width, ROWS, EACH)
    w_1, w_2, w_3 = w_0, w_0, w_0
    if AHEAD > 1:
        w_1 = fetch(w, row, rows - 1, own + step, width, ROWS, EACH)
    if AHEAD > 2:
        w_2 = fetch(w, row, rows - 1, own + 2 * step, width, ROWS, EACH)
        w_3 = fetch(w, row, rows - 1, own + 3 * step, width, ROWS, EACH)
    wait()
    zero = tl.zeros([32 * WARPS], tl.float32)
    sums = ()
    for _ in tl.static_range(M * ROWS):
        sums = both(sums, (zero,))
    for begin in tl.range(0, width, step * AHEAD):
        for turn in tl.static_range(AHEAD):
            some = w_0 if turn == 0 else w_1 if turn == 1 else w_2 if turn == 2 else w_3
            column = begin + turn * step + own
            later = some
            if width > step * AHEAD:
                later = fetch(w, row, rows - 1, column + AHEAD * step, width, ROWS, EACH)
            sums = add_columns(sums, some, x, x_stride, first, x_rows - 1, column, width, M, ROWS, EACH, is_whole)
            if turn == 0:
                w_0 = later
            elif turn == 1:
                w_1 = later
            elif turn == 2:
                w_2 = later
            else:
                w_3 = later
    total = tl.sum(tl.reshape(joined(sums, M * ROWS), [groups, SHARES, 32, M * ROWS]), 2)
    total = tl.reshape(tl.sum(total, 1), [groups, M, ROWS])
    m = first + tl.arange(0, M)[None, :, None]
    n = tl.program_id(1) * (groups * ROWS) + tl.arange(0, groups)[:, None, None] * ROWS
    n += tl.arange(0, ROWS)[None, None, :]
    is_out = (m < x_rows) & (n < rows)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < rows, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual + m.to(tl.int64) * residual_stride + n, mask=is_out, other=0.0)
    tl.store(y + m.to(tl.int64) * y_stride + n, total, mask=is_out)


def multiply(
    x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """y = x · weightᵀ (+ bias) (+ residual). x, y, residual: float32, each row contiguous; weight: contiguous.

    shape: rows of x and of the matrix, and steps under way, if other ones than `shape_for` has. No sum depends on them.
    """
    (count, width), rows = x.shape, len(weight)
    each = 16 // weight.dtype.itemsize
    together, at_once, ahead = shape or shape_for(count)
    shares = shares_of(rows, -(-width // (32 * each)))
    plain_kernel[(-(-count // together), -(-rows // (at_once * (WARPS // shares))))](
        x, weight, y, y if bias is None else bias, y if residual is None else residual,
        count, x.stride(0), y.stride(0), 0 if residual is None else residual.stride(0), rows, width=width,
        M=together, ROWS=at_once, WARPS=WARPS, SHARES=shares, EACH=each, AHEAD=ahead,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=WARPS, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip


def shape_for(count: int) -> tuple[int, int, int]:
    """Rows of x and of the matrix that a warp has at once, and steps of weights under way: what registers allow."""
    together = min(MOST, triton.next_power_of_2(count))
    return together, ROWS, 4 if together <= 2 else 2


def shares_of(rows: int, steps: int) -> int:
    """Warps that share a row of a matrix, in whose columns a warp takes so many steps; sums of a row depend on it."""
    wanted = 1 if rows >= MANY_ROWS else 2 if rows >= SOME_ROWS else WARPS
    return min(wanted, int(triton.next_power_of_2(steps)))
