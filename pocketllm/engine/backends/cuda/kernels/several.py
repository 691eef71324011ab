"""2 to 32 rows times a packed matrix on the tensor cores, every weight read once.

A row of x is float16 times one power of two, with each half unit's sum beside it in two float16 (`rows.write_eights`).
Codes enter as float16 without a conversion, as in `fragments`, less their offset. A group's scale meets the sum of its
products, so that no weight is rounded; minimums meet the sums of x on the tensor cores as well, once for a block.

A warp has 16 rows of the matrix. Warps of a program share them, taking turns at blocks, or have rows of their own. How
many share is the matrix's alone: a row of x has the same sums whatever rows are beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.fetch import fetch_tile, opened
from pocketllm.engine.backends.cuda.kernels.fragments import ULPS, mma, moved, of_step
from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED, OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    TABLE,
    K,
    four_at,
    half_of,
    load_two,
    look_up_both,
)
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed, units_of

AT_ONCE = 8
"""Rows of x that one instruction of the tensor cores takes."""
MAX_ROWS = 32
MANY_ROWS = 16384
"""From here on there are warps enough without many of them sharing a row."""
NARROW = 64
"""Units of a row below which fewer warps can share it."""
ONE_TILE, ONE_WAVE = 2112, 4224
"""Between so many rows programs of two tiles are one for each of 132 multiprocessors, and x is read half as often."""


@dataclass(frozen=True)
class Eights:
    """Rows of x as float16 times a power of two for each row, eight rows together.

    words: int32 [eights, units · 128], of each unit [8 rows, 4 threads, 4 words]; sums: int32 [eights, units · 16], of
    each block [8 rows, 4 units, 2 halves]; scales: float32 [rows].
    """

    words: Tensor
    sums: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.scales)


def new_eights(rows: int, width: int, device: torch.device) -> Eights:
    """Room for rows of x."""
    eights, units = -(-rows // AT_ONCE), units_of(width)

    def words(each: int) -> Tensor:
        return torch.empty(eights, units * each, dtype=torch.int32, device=device)

    return Eights(words(128), words(16), torch.empty(rows, dtype=torch.float32, device=device))


@triton.jit
def codes_in(w, v, high, t_0, t_1, t_2, t_3, S: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """Eight codes of unit S of a block, less the offset, in pairs of float16: of the first half values 0 and 2, then 1
    and 3; of the second the same, times SECOND.

    w: the unit's word, v: its second one of bytes; high: the word with its upper bits.
    """
    if (FORM == BYTE) or (FORM == TABLE):
        if FORM == BYTE:
            w, v = w ^ -2139062144, v ^ -2139062144  # 0x80 in each byte: 128 more
        else:
            w, v = look_up_both(w, t_0, t_1, t_2, t_3, OFFSET != 0)
        # 0x1400 is 2^-10, whose last place is worth 2^-20
        p_0, p_1 = w & 0x00FF00FF, (w >> 8) & 0x00FF00FF
        p_2, p_3 = (v & 0x00FF00FF) | 0x14001400, ((v >> 8) & 0x00FF00FF) | 0x14001400
        biased: tl.constexpr = OFFSET if OFFSET != 0 else 128
        return less(p_0, biased), less(p_1, biased), less(p_2, biased + 0x1400), less(p_3, biased + 0x1400)
    else:
        odd = w >> 8
        p_0, p_1, p_2, p_3 = w & 0x000F000F, odd & 0x000F000F, w & 0x00F000F0, odd & 0x00F000F0
        if FORM == NIBBLE_1:
            p_0, p_1 = p_0 | (moved(high, 2 * S - 4) & 0x00100010), p_1 | (moved(high, 2 * S + 4) & 0x00100010)
            p_2, p_3 = p_2 | (moved(high, 2 * S - 7) & 0x01000100), p_3 | (moved(high, 2 * S + 1) & 0x01000100)
        if FORM == NIBBLE_2:
            at: tl.constexpr = 4 * (S % 2)
            p_0, p_1 = p_0 | (moved(high, at - 4) & 0x00300030), p_1 | (moved(high, at + 4) & 0x00300030)
            p_2, p_3 = p_2 | (moved(high, at - 6) & 0x03000300), p_3 | (moved(high, at + 2) & 0x03000300)
        return less(p_0, OFFSET), less(p_1, OFFSET), less(p_2, 16 * OFFSET), less(p_3, 16 * OFFSET)


@triton.jit
def less(pair, BITS: tl.constexpr):
    """Two float16 less the one with these bits."""
    if BITS == 0:
        return pair
    negative: tl.constexpr = BITS * 65537 - 0x7FFF8000  # both signs set, as an int32
    if IS_INTERPRETED:
        other = (pair & 0) + negative
        return halves_in(half_of(pair, 0) + half_of(other, 0), half_of(pair, 1) + half_of(other, 1))
    else:
        return tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, negative], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def halves_in(low, high):
    """Two float32 as float16 in an int32."""
    low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def codes_of(w, t_0, t_1, t_2, t_3, STEP: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """Codes of unit STEP of a tile's near and far row."""
    near, far = w[0], w[1]
    return (
        codes_in(near[0][STEP], near[1][STEP], near[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM, OFFSET),
        codes_in(far[0][STEP], far[1][STEP], far[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM, OFFSET),
    )


@triton.jit
def in_ulps(fetched, is_in, GROUP: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr):
    """Scales of a unit's groups for codes in the low bits of a float16; zeros past the last block."""
    scale, _, second, _ = opened(fetched, GROUP, SCALES)
    if not IS_EVEN:
        scale, second = tl.where(is_in, scale, 0.0), tl.where(is_in, second, 0.0)
    return scale * ULPS, second * ULPS


@triton.jit
def of_unit(scales, STEP: tl.constexpr, GROUP: tl.constexpr):
    """Scales that thread STEP of each quad has."""
    first = of_step(scales[0], STEP)
    second = first
    if GROUP == 16:
        second = of_step(scales[1], STEP)
    return first, second


@triton.jit
def fetch_columns(x, units: tl.constexpr, COLUMNS: tl.constexpr):
    """A thread's pairs of a unit of all rows of x, of each eight of them."""
    x_0 = four_at(x)
    x_1, x_2, x_3 = x_0, x_0, x_0
    if COLUMNS > 1:
        x_1 = four_at(x + units * 128)
    if COLUMNS > 2:
        x_2 = four_at(x + 2 * units * 128)
    if COLUMNS > 3:
        x_3 = four_at(x + 3 * units * 128)
    return x_0, x_1, x_2, x_3


@triton.jit
def plus_scaled(acc, d, near, far):
    """acc + d times the scales of a near and a far row."""
    return tl.fma(d[0], near, acc[0]), tl.fma(d[1], near, acc[1]), tl.fma(d[2], far, acc[2]), tl.fma(d[3], far, acc[3])


@triton.jit
def add_columns(acc, a, b, near, far, x, GROUP: tl.constexpr):
    """Add one unit of 16 rows (a near, b far) times 8 rows of x."""
    zero = tl.zeros([x[0].shape[0]], tl.float32)
    none = (zero, zero, zero, zero)
    low = mma(a[0], b[0], a[1], b[1], x[0], x[1], none)
    if GROUP == 32:
        low = mma(a[2], b[2], a[3], b[3], x[2], x[3], low)
        return plus_scaled(acc, low, near[0], far[0])
    else:
        acc = plus_scaled(acc, low, near[0], far[0])
        return plus_scaled(acc, mma(a[2], b[2], a[3], b[3], x[2], x[3], none), near[1], far[1])


@triton.jit
def add_unit(
    sums, w, near, far, x, t_0, t_1, t_2, t_3, STEP: tl.constexpr,
    OFFSET: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add unit STEP of a tile's block times all rows of x; sums: of each eight of them."""
    a, b = codes_of(w, t_0, t_1, t_2, t_3, STEP, FORM, OFFSET)
    near, far = of_unit(near, STEP, GROUP), of_unit(far, STEP, GROUP)
    p_0, p_1, p_2, p_3 = sums
    p_0 = add_columns(p_0, a, b, near, far, x[0], GROUP)
    if COLUMNS > 1:
        p_1 = add_columns(p_1, a, b, near, far, x[1], GROUP)
    if COLUMNS > 2:
        p_2 = add_columns(p_2, a, b, near, far, x[2], GROUP)
    if COLUMNS > 3:
        p_3 = add_columns(p_3, a, b, near, far, x[3], GROUP)
    return p_0, p_1, p_2, p_3


@triton.jit
def minimums_of(fetched, is_in, GROUP: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr):
    """Minimums of a unit's two halves as pairs of equal float16, and what their sum is multiplied by."""
    first, last, both = fetched
    if SCALES == K:  # bytes in the low bits of a float16, as codes are
        m_0, m_1 = (first.to(tl.int32) >> 8) & 255, (last.to(tl.int32) >> 8) & 255
        factor = half_of(both, 1) * -ULPS
    else:
        m_0, m_1 = (first >> 16) & 0xFFFF, (last >> 16) & 0xFFFF
        factor = tl.full([first.shape[0]], 1.0, tl.float32)
    if not IS_EVEN:
        factor = tl.where(is_in, factor, 0.0)
    return m_0 * 65537, m_1 * 65537, factor


@triton.jit
def add_minimums(
    sums, w, totals, is_in, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Add a block's minimums times what rows of x sum to over each half of a unit, two float16 for each sum."""
    near_0, near_1, near = minimums_of(w[2], is_in, GROUP, SCALES, IS_EVEN)
    far_0, far_1, far = minimums_of(w[3], is_in, GROUP, SCALES, IS_EVEN)
    zero = tl.zeros([near.shape[0]], tl.float32)
    none = (zero, zero, zero, zero)
    p_0, p_1, p_2, p_3 = sums
    p_0 = plus_scaled(p_0, mma(near_0, far_0, near_1, far_1, totals[0][0], totals[0][1], none), near, far)
    if COLUMNS > 1:
        p_1 = plus_scaled(p_1, mma(near_0, far_0, near_1, far_1, totals[1][0], totals[1][1], none), near, far)
    if COLUMNS > 2:
        p_2 = plus_scaled(p_2, mma(near_0, far_0, near_1, far_1, totals[2][0], totals[2][1], none), near, far)
    if COLUMNS > 3:
        p_3 = plus_scaled(p_3, mma(near_0, far_0, near_1, far_1, totals[3][0], totals[3][1], none), near, far)
    return p_0, p_1, p_2, p_3


@triton.jit
def fetch_totals(marks, at, units: tl.constexpr, COLUMNS: tl.constexpr):
    """A thread's pairs of sums of a block's unit of its place, of a row of x of each eight."""
    m_0 = load_two(marks, at)
    m_1, m_2, m_3 = m_0, m_0, m_0
    if COLUMNS > 1:
        m_1 = load_two(marks + units * 16, at)
    if COLUMNS > 2:
        m_2 = load_two(marks + 2 * units * 16, at)
    if COLUMNS > 3:
        m_3 = load_two(marks + 3 * units * 16, at)
    return m_0, m_1, m_2, m_3


@triton.jit
def fetch_x(x, x_sums, block, lane, units: tl.constexpr, COLUMNS: tl.constexpr, HAS_MIN: tl.constexpr):
    """A thread's pairs of all units of a block of all rows of x, and of their sums."""
    own = x + (block * 512 + lane * 4)
    x_0, x_1 = fetch_columns(own, units, COLUMNS), fetch_columns(own + 128, units, COLUMNS)
    x_2, x_3 = fetch_columns(own + 256, units, COLUMNS), fetch_columns(own + 384, units, COLUMNS)
    totals = x_0
    if HAS_MIN:
        totals = fetch_totals(x_sums, block * 64 + lane * 2, units, COLUMNS)
    return (x_0, x_1, x_2, x_3), totals


@triton.jit
def add_block(
    sums, w, x, totals, is_in, t_0, t_1, t_2, t_3, OFFSET: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add a block of a warp's 16 rows times all rows of x; sums: of each eight of them."""
    near, far = in_ulps(w[2], is_in, GROUP, SCALES, IS_EVEN), in_ulps(w[3], is_in, GROUP, SCALES, IS_EVEN)
    for step in tl.static_range(4):
        sums = add_unit(sums, w, near, far, x[step], t_0, t_1, t_2, t_3, step, OFFSET, COLUMNS, GROUP, FORM)
    if (SCALES == HALVES) or (SCALES == K):
        sums = add_minimums(sums, w, totals, is_in, COLUMNS, GROUP, SCALES, IS_EVEN)
    return sums


@triton.jit
def four_in(acc):
    """A thread's sums of two rows and two columns: [threads, row half, column]."""
    return tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))


@triton.jit
def result_of(sums, TILES: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over the warps that share rows: [rows of x, filled up to 8, 16 or 32, rows of TILES warps]."""
    if COLUMNS == 1:
        own = four_in(sums[0])
    elif COLUMNS == 2:
        own = tl.join(four_in(sums[0]), four_in(sums[1]))
    else:
        low, high = tl.join(four_in(sums[0]), four_in(sums[2])), tl.join(four_in(sums[1]), four_in(sums[3]))
        own = tl.join(low, high)
    eights: tl.constexpr = 1 if COLUMNS == 1 else 2 if COLUMNS == 2 else 4
    # of the eights of rows, 2 · first + second as they were joined
    total = tl.sum(tl.reshape(own, [SHARES, TILES, 8, 4, 2, 2, eights]), 0)
    return tl.reshape(tl.permute(total, (5, 2, 4, 0, 3, 1)), [8 * eights, TILES * 16])


@triton.jit
def write_sums(
    result, first_row, y, x_scales, bias, residual, x_rows, y_stride, residual_stride, rows,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sums of all rows of x, times their scales, with what is added to them."""
    m = tl.arange(0, result.shape[0])
    n = first_row + tl.arange(0, result.shape[1])
    is_out = (m < x_rows)[:, None] & (n < rows)[None, :]
    result *= tl.load(x_scales + m, mask=m < x_rows, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0)[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=is_out, other=0.0)
    tl.store(y + m[:, None] * y_stride + n[None, :], result, mask=is_out)


@triton.jit
def several_kernel(
    x, x_sums, x_scales, w_words, w_high, w_scales, w_shared, y, bias, residual,
    x_rows, y_stride, residual_stride, rows, last_tile, t_0, t_1, t_2, t_3,
    units: tl.constexpr, OFFSET: tl.constexpr, TILES: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] for TILES · 16 rows n, SHARES warps for each 16, and 8 · COLUMNS rows m at most."""
    blocks: tl.constexpr = units // 4
    is_even: tl.constexpr = blocks % SHARES == 0
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    thread = tl.arange(0, 32 * TILES * SHARES)
    lane, share = thread % 32, thread // (32 * TILES)
    first = tl.program_id(0) * TILES
    tile = tl.minimum(first + thread // 32 % TILES, last_tile).to(tl.int64)
    if (FORM == TABLE) and (OFFSET == 0):  # 128 more, so that no byte has a sign
        t_0, t_1, t_2, t_3 = t_0 ^ -2139062144, t_1 ^ -2139062144, t_2 ^ -2139062144, t_3 ^ -2139062144
    zero = tl.zeros([32 * TILES * SHARES], tl.float32)
    none = (zero, zero, zero, zero)
    sums = (none, none, none, none)
    w = fetch_tile(w_words, w_high, w_scales, w_shared, tile, share, lane, units, GROUP, FORM, SCALES)
    wait()
    for begin in tl.range(0, blocks, SHARES):
        at = begin + share
        some, totals = fetch_x(x, x_sums, tl.minimum(at, blocks - 1), lane, units, COLUMNS, has_min)
        later = w
        if blocks > SHARES:
            after = at + SHARES
            later = fetch_tile(w_words, w_high, w_scales, w_shared, tile, after, lane, units, GROUP, FORM, SCALES)
        sums = add_block(
            sums, w, some, totals, at < blocks, t_0, t_1, t_2, t_3, OFFSET, COLUMNS, GROUP, FORM, SCALES, is_even
        )
        w = later
    write_sums(
        result_of(sums, TILES, SHARES, COLUMNS), first * 16, y, x_scales, bias, residual, x_rows, y_stride,
        residual_stride, rows, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def shape_for(packed: Packed) -> tuple[int, int]:
    """Tiles of a program and warps for each, as they were fastest on an H200; sums of a row depend on the latter."""
    if packed.rows >= MANY_ROWS:
        return 2, 2
    return 2 if ONE_TILE < packed.rows <= ONE_WAVE else 1, 8 if packed.units >= NARROW else 4


def multiply(
    x: Eights,
    packed: Packed,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    shape: tuple[int, int] | None = None,
) -> None:
    """y = x · weightᵀ (+ bias) (+ residual) of 2 to 32 rows. y, residual: float32 [rows of x, rows]."""
    layout = packed.layout
    tiles, shares = shape or shape_for(packed)
    several_kernel[(-(-packed.rows // (tiles * TILE_ROWS)),)](
        x.words, x.sums, x.scales, packed.words, packed.high, packed.scales, packed.shared,
        y, y if bias is None else bias, y if residual is None else residual,
        len(x), y.stride(0), 0 if residual is None else residual.stride(0), packed.rows, len(packed.words) - 1,
        *layout.packed_table,
        units=packed.units, OFFSET=layout.offset, TILES=tiles, SHARES=shares, COLUMNS=-(-len(x) // AT_ONCE),
        GROUP=layout.group, FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=tiles * shares, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip
