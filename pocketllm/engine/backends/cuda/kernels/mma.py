"""Up to 32 rows times a packed matrix on the tensor cores, every weight read once.

A thread works by itself here: tensors have one element for each thread, and one assembly instruction multiplies a
warp's 16 rows of 32 (or 16) codes with 8 rows of x. The words of one place of a block are just what a thread of a quad
holds of the left operand, for four units one after another (PTX ISA, "Matrix Fragments for mma.m16n8k32"). The warps
of a program take turns at the blocks of a row. Triton's interpreter cannot run this; it has `gemv`, whose results
differ in the order of sums alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.gemv import fetch_row, less_offset
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.words import (
    HALVES,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    bytes_of,
    four_at,
    scales_of,
    two_at,
)
from pocketllm.engine.backends.cuda.packing import Packed

AT_ONCE = 8
"""Rows of x that one instruction takes."""
MAX_ROWS = 32
FEW_ROWS, MANY_ROWS = 4096, 16384
"""Rows of a matrix up to which 16 warps a program are fastest, and from which on 4 are; between them 8."""
OF_0, OF_1, OF_2, OF_3 = (tl.constexpr(f"shfl.sync.idx.b32 $0, $1, {step}, 0x1c1f, 0xffffffff;") for step in range(4))
MMA_32 = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$10,$10,$10};"
)
MMA_16 = tl.constexpr("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$7,$7,$7};")


@triton.jit
def mma_32(a_0, a_1, a_2, a_3, b_0, b_1):
    """Sums of a warp's 16 rows times 8 rows: of row gid and columns 2 tid, 2 tid + 1, then of row gid + 8."""
    return tl.inline_asm_elementwise(
        MMA_32, "=r,=r,=r,=r,r,r,r,r,r,r,r", [a_0, a_1, a_2, a_3, b_0, b_1, a_0 & 0],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def mma_16(a_0, a_1, b_0):
    """The same over 16 values."""
    return tl.inline_asm_elementwise(
        MMA_16, "=r,=r,=r,=r,r,r,r,r", [a_0, a_1, b_0, a_0 & 0],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def of_step(x, STEP: tl.constexpr):
    """A float32 of thread STEP of each quad."""
    number = x.to(tl.int32, bitcast=True)
    if STEP == 0:
        number = tl.inline_asm_elementwise(OF_0, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    elif STEP == 1:
        number = tl.inline_asm_elementwise(OF_1, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    elif STEP == 2:
        number = tl.inline_asm_elementwise(OF_2, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    else:
        number = tl.inline_asm_elementwise(OF_3, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    return number.to(tl.float32, bitcast=True)


@triton.jit
def fetch_scales(w_scales, w_shared, row, u, units: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """What memory has of the scales of a unit's one or two groups; not looked at yet, so that nothing waits."""
    groups: tl.constexpr = units * 32 // GROUP
    tile, r = row // TILE, row % TILE
    at = (tile * groups + u * (32 // GROUP)) * TILE + r
    first = tl.load(w_scales + at)
    last = first
    if GROUP == 16:
        last = tl.load(w_scales + at + TILE)
    both = first
    if (SCALES == K) or (SCALES == SIGNED):
        each: tl.constexpr = SHARED_VALUES // 32
        both = tl.load(w_shared + (tile * tl.cdiv(units, each) + u // each) * TILE + r)
    return first, last, both


@triton.jit
def fetch_tile(
    w_words, w_high, w_scales, w_shared, first_row, last_row, u, lane,
    units: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A thread's part of 16 rows: words of a near and a far row at its place, scales of its unit. Past the end, the
    last row again."""
    near = tl.minimum(first_row + lane // 4, last_row).to(tl.int64)
    far = tl.minimum(first_row + 8 + lane // 4, last_row).to(tl.int64)
    return (
        fetch_row(w_words, w_high, near, u, units, FORM),
        fetch_row(w_words, w_high, far, u, units, FORM),
        fetch_scales(w_scales, w_shared, near, u, units, GROUP, SCALES),
        fetch_scales(w_scales, w_shared, far, u, units, GROUP, SCALES),
    )


@triton.jit
def fetch_columns(x, marks, is_in, GROUP: tl.constexpr, IS_EVEN: tl.constexpr):
    """A thread's words of a unit of 8 rows of x, and its two columns' scales and sums (of both halves)."""
    b_0, b_1 = two_at(x)
    x_0, x_1, t_0, t_1 = four_at(marks)
    if not IS_EVEN:
        x_0, x_1 = tl.where(is_in, x_0, 0.0), tl.where(is_in, x_1, 0.0)
    t_2, t_3 = t_0, t_1
    if GROUP == 16:
        t_0, t_1, t_2, t_3 = four_at(marks + 4)
    return b_0, b_1, x_0, x_1, t_0, t_1, t_2, t_3


@triton.jit
def codes_of(fetched, t_0, t_1, t_2, t_3, STEP: tl.constexpr, FORM: tl.constexpr):
    """A thread's words of both halves of unit STEP: of its near row, then of its far row."""
    w, high, second = fetched[0]
    v, far_high, far_second = fetched[1]
    return (
        bytes_of(w[STEP], high, second, t_0, t_1, t_2, t_3, STEP, 0, FORM),
        bytes_of(w[4 + STEP], high, second, t_0, t_1, t_2, t_3, STEP, 1, FORM),
        bytes_of(v[STEP], far_high, far_second, t_0, t_1, t_2, t_3, STEP, 0, FORM),
        bytes_of(v[4 + STEP], far_high, far_second, t_0, t_1, t_2, t_3, STEP, 1, FORM),
    )


@triton.jit
def scaled(acc, d, scale, minimum, total, x_scale, OFFSET: tl.constexpr, HAS_MIN: tl.constexpr):
    """acc + x_scale · (scale · (d - offset · total) - minimum · total)."""
    value = scale * less_offset(d, total, OFFSET)
    if HAS_MIN:
        value = tl.fma(-minimum, total, value)
    return tl.fma(x_scale, value, acc)


@triton.jit
def add_columns(acc, a, near, far, columns, GROUP: tl.constexpr, OFFSET: tl.constexpr, HAS_MIN: tl.constexpr):
    """Add one unit of 16 rows times 8 rows of x: codes, scales and minimums of both groups, columns."""
    b_0, b_1, x_0, x_1, t_0, t_1, t_2, t_3 = columns
    acc_0, acc_1, acc_2, acc_3 = acc
    if GROUP == 32:
        d_0, d_1, d_2, d_3 = mma_32(a[0], a[2], a[1], a[3], b_0, b_1)
    else:
        d_0, d_1, d_2, d_3 = mma_16(a[1], a[3], b_1)
        acc_0 = scaled(acc_0, d_0, near[2], near[3], t_2, x_0, OFFSET, HAS_MIN)
        acc_1 = scaled(acc_1, d_1, near[2], near[3], t_3, x_1, OFFSET, HAS_MIN)
        acc_2 = scaled(acc_2, d_2, far[2], far[3], t_2, x_0, OFFSET, HAS_MIN)
        acc_3 = scaled(acc_3, d_3, far[2], far[3], t_3, x_1, OFFSET, HAS_MIN)
        d_0, d_1, d_2, d_3 = mma_16(a[0], a[2], b_0)
    acc_0 = scaled(acc_0, d_0, near[0], near[1], t_0, x_0, OFFSET, HAS_MIN)
    acc_1 = scaled(acc_1, d_1, near[0], near[1], t_1, x_1, OFFSET, HAS_MIN)
    acc_2 = scaled(acc_2, d_2, far[0], far[1], t_0, x_0, OFFSET, HAS_MIN)
    acc_3 = scaled(acc_3, d_3, far[0], far[1], t_1, x_1, OFFSET, HAS_MIN)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def store_tile(
    acc, y, bias, residual, first_row, rows, first_column, x_rows, y_stride, residual_stride,
    WARPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sum over the warps of a program, and write a tile of 16 rows by 8."""
    four = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))  # [threads, row half, column]
    sums = tl.sum(tl.reshape(four, [WARPS, 32, 2, 2]), 0)
    lane = tl.arange(0, 32)[:, None, None]
    n = first_row + lane // 4 + 8 * tl.arange(0, 2)[None, :, None]
    m = first_column + 2 * (lane % 4) + tl.arange(0, 2)[None, None, :]
    is_out = (n < rows) & (m < x_rows)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < rows, other=0.0)
    if HAS_RESIDUAL:
        sums += tl.load(residual + m * residual_stride + n, mask=is_out, other=0.0)
    tl.store(y + m * y_stride + n, sums, mask=is_out)


@triton.jit
def of_unit(scales, STEP: tl.constexpr, GROUP: tl.constexpr):
    """Scales and minimums that thread STEP of each quad has."""
    first, minimum = of_step(scales[0], STEP), of_step(scales[1], STEP)
    if GROUP == 16:
        return first, minimum, of_step(scales[2], STEP), of_step(scales[3], STEP)
    else:
        return first, minimum, first, minimum


@triton.jit
def opened(fetched, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """Scale and minimum of a unit's groups."""
    first, last, both = fetched
    scale, minimum = scales_of(first, both, SCALES)
    if GROUP == 16:
        second, second_minimum = scales_of(last, both, SCALES)
        return scale, minimum, second, second_minimum
    else:
        return scale, minimum, scale, minimum


@triton.jit
def mma_kernel(
    x, marks, w_words, w_high, w_scales, w_shared, y, bias, residual, x_rows, y_stride, residual_stride, rows,
    last_row, t_0, t_1, t_2, t_3,
    units: tl.constexpr, OFFSET: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] (+ bias[n]) (+ residual[m, n]) for 16 rows n and 8 · COLUMNS rows m at most.

    x, marks: in the order of `rows.write_rows(…, in_fragments=True)`.
    """
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    blocks: tl.constexpr = units // 4
    is_even: tl.constexpr = blocks % WARPS == 0
    thread = tl.arange(0, 32 * WARPS)
    warp, lane, place = thread // 32, thread % 32, thread % 4
    first_row = tl.program_id(0) * 16
    zero = tl.zeros([32 * WARPS], tl.float32)
    none = (zero, zero, zero, zero)
    p_0, p_1, p_2, p_3 = none, none, none, none
    u = (tl.minimum(warp, blocks - 1) * 4 + place).to(tl.int64)
    w = fetch_tile(w_words, w_high, w_scales, w_shared, first_row, last_row, u, lane, units, GROUP, FORM, SCALES)
    wait()
    for begin in tl.range(0, blocks, WARPS):
        u = (tl.minimum(begin + WARPS + warp, blocks - 1) * 4 + place).to(tl.int64)
        next_w = fetch_tile(
            w_words, w_high, w_scales, w_shared, first_row, last_row, u, lane, units, GROUP, FORM, SCALES
        )
        w_near, w_far = opened(w[2], GROUP, SCALES), opened(w[3], GROUP, SCALES)
        is_in = begin + warp < blocks
        block = tl.minimum(begin + warp, blocks - 1).to(tl.int64)
        x_block, marks_block = x + block * 256 + lane * 2, marks + block * 128 + place * 8
        for step in tl.static_range(4):
            a = codes_of(w, t_0, t_1, t_2, t_3, step, FORM)
            near, far = of_unit(w_near, step, GROUP), of_unit(w_far, step, GROUP)
            x_step, marks_step = x_block + step * 64, marks_block + step * 32
            some = fetch_columns(x_step, marks_step, is_in, GROUP, is_even)
            p_0 = add_columns(p_0, a, near, far, some, GROUP, OFFSET, has_min)
            if COLUMNS > 1:
                some = fetch_columns(x_step + units * 64, marks_step + units * 32, is_in, GROUP, is_even)
                p_1 = add_columns(p_1, a, near, far, some, GROUP, OFFSET, has_min)
            if COLUMNS > 2:
                some = fetch_columns(x_step + 2 * units * 64, marks_step + 2 * units * 32, is_in, GROUP, is_even)
                p_2 = add_columns(p_2, a, near, far, some, GROUP, OFFSET, has_min)
            if COLUMNS > 3:
                some = fetch_columns(x_step + 3 * units * 64, marks_step + 3 * units * 32, is_in, GROUP, is_even)
                p_3 = add_columns(p_3, a, near, far, some, GROUP, OFFSET, has_min)
        w = next_w
    sums = (p_0, p_1, p_2, p_3)
    for column in tl.static_range(COLUMNS):
        store_tile(
            sums[column], y, bias, residual, first_row, rows, 8 * column, x_rows, y_stride, residual_stride,
            WARPS, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


def multiply(
    x: Tensor,
    marks: Tensor,
    packed: Packed,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    num_warps: int | None = None,
) -> None:
    """y = x · weightᵀ (+ bias) (+ residual) of up to MAX_ROWS rows.

    x: int32, marks: float32, of whole eights of rows in the order of fragments. y, residual: float32 [tokens, rows].
    """
    layout = packed.layout
    columns = -(-len(y) // AT_ONCE)
    num_warps = num_warps or warps_for(packed.rows, columns)
    mma_kernel[(-(-packed.rows // 16),)](
        x, marks, packed.words, packed.high, packed.scales, packed.shared,
        y, y if bias is None else bias, y if residual is None else residual,
        len(y), y.stride(0), 0 if residual is None else residual.stride(0), packed.rows, len(packed.words) - 1,
        *layout.packed_table,
        units=packed.units, OFFSET=layout.offset, WARPS=num_warps, COLUMNS=columns, GROUP=layout.group,
        FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=num_warps, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip


def warps_for(rows: int, columns: int) -> int:
    """Warps of a program, as they were fastest on an H200: sums of a row depend on them."""
    warps = 4 if rows >= MANY_ROWS else 16 if rows <= FEW_ROWS else 8
    return warps if columns <= 2 else max(4, warps // 2)
