"""2 to 32 rows times a packed matrix on the tensor cores, every weight read once and x from shared memory.

A row of x is float16 times one power of two, each half unit's sum beside it in two float16 (`rows.write_several`). A
warp has 16 rows of the matrix, four warps are a tile of `tl.dot`: codes become float16 without a conversion in the
threads that multiply them (`codes`), so that this operand never leaves registers, and x is the other one, copied to
shared memory some blocks ahead with the words. Rows of x are columns there, 16 or 32 of them.

Scales that are integers multiply codes first: exact up to 2048, which only the largest products of Q6_K and IQ4_XS
exceed; those are rounded as float16 are. What they are multiples of, and scales that are floats, meet sums of products.
Minimums meet sums of x on the tensor cores as well, once for a block.

Where rows of the matrix are few, several programs share them, each with its own blocks; the last to finish puts their
sums together in order. How many is the matrix's alone: a row of x has the same sums whatever rows are beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.codes import (
    ULPS,
    codes_of,
    float_of_step,
    less,
    of_step,
    table_without_signs,
    times,
)
from pocketllm.engine.backends.cuda.kernels.fetch import fetch_tile, opened, prefetch
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.words import HALVES, SIGNED, K, half_of
from pocketllm.engine.backends.cuda.layouts import BLOCK_UNITS, TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed, units_of

AT_ONCE, MAX_ROWS = 16, 32
"""Rows of x that one instruction takes: few, or as many as there may be."""
WARPS = 4
"""Of a program: one instruction's 64 rows of a matrix."""
PROGRAMS = 528
"""Up to so many share rows of a matrix: four for each of 132 multiprocessors, which have room for as many."""
MAX_SPLITS = 16
"""Programs that share rows."""
EARLY = 2
"""Times 4 KiB of each warp's words that are asked for into the second-level cache while the kernel before runs."""
COUNTERS = 512
"""Of what has more than one program for its rows: not more than half of PROGRAMS."""


@dataclass(frozen=True)
class Several:
    """Rows of x as float16 times a power of two for each row, as many together as one instruction takes.

    words: float16 [tiles, blocks, N, 128], values of a unit in the order of fragments (`rows.write_several`); sums:
    float16 [tiles, blocks, N, 16], N rows a tile; scales: float32 [rows]; arrivals: int32 [COUNTERS], zeros before and
    after a product.
    """

    words: Tensor
    sums: Tensor
    scales: Tensor
    arrivals: Tensor

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def as_written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Words as pairs in an int32, scales, and sums as such pairs."""
        return self.words.view(torch.int32), self.scales, self.sums.view(torch.int32)

    def tile(self, number: int) -> "Several":
        """One tile of it."""
        if len(self.words) == 1:
            return self
        tile, rows = slice(number, number + 1), slice(number * self.together, (number + 1) * self.together)
        return Several(self.words[tile], self.sums[tile], self.scales[rows], self.arrivals)

    @property
    def together(self) -> int:
        """Rows of a tile."""
        return int(self.words.shape[2])


def new_several(rows: int, width: int, device: torch.device, together: int | None = None) -> Several:
    """Room for rows of x; together: rows of a tile, where they are more than one tile."""
    together = together or (AT_ONCE if rows <= AT_ONCE else MAX_ROWS)
    tiles, blocks = -(-rows // together), units_of(width) // BLOCK_UNITS

    def halves(each: int) -> Tensor:
        return torch.empty(tiles, blocks, together, each, dtype=torch.float16, device=device)

    return Several(
        halves(128),
        halves(16),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(COUNTERS, dtype=torch.int32, device=device),
    )


@triton.jit
def halves_of(pair):
    """[threads] pairs → [threads, 2] float16."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True))


@triton.jit
def fragment_of(near_0, near_1, far_0, far_1):
    """16 columns of a near and a far row: [threads, in a pair, pair, row half]."""
    near = tl.join(halves_of(near_0), halves_of(near_1))
    return tl.join(near, tl.join(halves_of(far_0), halves_of(far_1)))


@triton.jit
def unit_of(near, far):
    """32 columns: [threads, in a pair, pair, row half, half of the unit]."""
    return tl.join(fragment_of(near[0], near[1], far[0], far[1]), fragment_of(near[2], near[3], far[2], far[3]))


# The next three only say which row and column of a `tl.dot` each number is: its operand lies in threads in this order,
# so that nothing moves (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16").


@triton.jit
def operand_of_16(fragment, WARPS: tl.constexpr):
    """[16 · WARPS rows, 16 columns]"""
    parts = tl.reshape(fragment, [WARPS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 5, 1, 4, 2, 3)), [WARPS * 16, 16])


@triton.jit
def operand_of_32(unit, WARPS: tl.constexpr):
    """[16 · WARPS rows, 32 columns]"""
    parts = tl.reshape(unit, [WARPS, 8, 4, 2, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 5, 1, 6, 4, 2, 3)), [WARPS * 16, 32])


@triton.jit
def operand_of_128(unit_0, unit_1, unit_2, unit_3, WARPS: tl.constexpr):
    """[16 · WARPS rows, 128 columns]"""
    units = tl.join(tl.join(unit_0, unit_1), tl.join(unit_2, unit_3))
    parts = tl.reshape(units, [WARPS, 8, 4, 2, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 5, 1, 8, 7, 6, 4, 2, 3)), [WARPS * 16, 128])


@triton.jit
def of_rows(near, far, WARPS: tl.constexpr, N: tl.constexpr):
    """Numbers of each thread's near and far row, as the sums [16 · WARPS, N] lie in threads."""
    own = tl.reshape(tl.join(near, far), [WARPS, 8, 4, 2, 1, 1])
    own = tl.permute(own, (0, 3, 1, 4, 2, 5))  # warp, row half, row, eight columns, two of them, one
    return tl.reshape(tl.broadcast_to(own, [WARPS, 2, 8, N // 8, 4, 2]), [WARPS * 16, N])


@triton.jit
def scale_pair(small, SCALES: tl.constexpr):
    """An integer scale as two equal float16: 1024 more than it in the low bits of one, less 1024."""
    if SCALES == K:
        return less(((small.to(tl.int32) & 255) * 65537) | 0x64006400, 0x6400)
    else:
        return less((((small.to(tl.int32) & 255) ^ 128) * 65537) | 0x64006400, 0x6480)


@triton.jit
def times_scales(codes, scales, STEP: tl.constexpr, GROUP: tl.constexpr):
    """A row's codes of unit STEP times the scales that thread STEP of the quad has."""
    first = of_step(scales[0], STEP)
    second = first
    if GROUP == 16:
        second = of_step(scales[1], STEP)
    return times(codes[0], first), times(codes[1], first), times(codes[2], second), times(codes[3], second)


@triton.jit
def scaled_unit(
    w, near, far, t_0, t_1, t_2, t_3, STEP: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr
):
    """Codes of unit STEP of a tile times their integer scales, as `unit_of`."""
    near_codes, far_codes = codes_of(w, t_0, t_1, t_2, t_3, STEP, FORM, OFFSET)
    return unit_of(times_scales(near_codes, near, STEP, GROUP), times_scales(far_codes, far, STEP, GROUP))


@triton.jit
def shared_of(both, SCALES: tl.constexpr):
    """What integer scales are multiples of."""
    if SCALES == K:
        return half_of(both, 0) * ULPS
    else:
        return both.to(tl.float32) * ULPS


@triton.jit
def minimums_of(fetched, SCALES: tl.constexpr):
    """Minimums of a unit's two halves as pairs of equal float16, and what their sum is multiplied by."""
    first, last, both = fetched
    if SCALES == K:  # bytes in the low bits of a float16, as codes are
        m_0, m_1 = (first.to(tl.int32) >> 8) & 255, (last.to(tl.int32) >> 8) & 255
        factor = half_of(both, 1) * -ULPS
    else:
        m_0, m_1 = (first >> 16) & 0xFFFF, (last >> 16) & 0xFFFF
        factor = tl.full([first.shape[0]], 1.0, tl.float32)
    return m_0 * 65537, m_1 * 65537, factor


@triton.jit
def add_block(
    acc, w, x, x_sums, t_0, t_1, t_2, t_3, WARPS: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """acc [16 · WARPS, N] + a block of a tile a warp times N rows of x. x, x_sums: where the rows begin, [N, 1]."""
    columns: tl.constexpr = acc.shape[1]
    if (SCALES == K) or (SCALES == SIGNED):
        near = scale_pair(w[2][0], SCALES), scale_pair(w[2][1], SCALES)
        far = scale_pair(w[3][0], SCALES), scale_pair(w[3][1], SCALES)
        codes = operand_of_128(
            scaled_unit(w, near, far, t_0, t_1, t_2, t_3, 0, GROUP, FORM, OFFSET),
            scaled_unit(w, near, far, t_0, t_1, t_2, t_3, 1, GROUP, FORM, OFFSET),
            scaled_unit(w, near, far, t_0, t_1, t_2, t_3, 2, GROUP, FORM, OFFSET),
            scaled_unit(w, near, far, t_0, t_1, t_2, t_3, 3, GROUP, FORM, OFFSET),
            WARPS,
        )
        d = tl.dot(codes, tl.trans(tl.load(x + tl.arange(0, 128)[None, :])))
        acc = tl.fma(d, of_rows(shared_of(w[2][2], SCALES), shared_of(w[3][2], SCALES), WARPS, columns), acc)
    else:
        near, far = opened(w[2], GROUP, SCALES)[0] * ULPS, opened(w[3], GROUP, SCALES)[0] * ULPS
        for step in tl.static_range(4):
            codes = codes_of(w, t_0, t_1, t_2, t_3, step, FORM, OFFSET)
            some = tl.load(x + step * 32 + tl.arange(0, 32)[None, :])
            d = tl.dot(operand_of_32(unit_of(codes[0], codes[1]), WARPS), tl.trans(some))
            acc = tl.fma(d, of_rows(float_of_step(near, step), float_of_step(far, step), WARPS, columns), acc)
    if (SCALES == HALVES) or (SCALES == K):
        near_0, near_1, near = minimums_of(w[2], SCALES)
        far_0, far_1, far = minimums_of(w[3], SCALES)
        some = tl.load(x_sums + tl.arange(0, 16)[None, :])
        d = tl.dot(operand_of_16(fragment_of(near_0, near_1, far_0, far_1), WARPS), tl.trans(some))
        acc = tl.fma(d, of_rows(near, far, WARPS, columns), acc)
    return acc


@triton.jit
def add_blocks(
    acc, x, x_sums, w_words, w_high, w_scales, w_shared, tile, begin, end, t_0, t_1, t_2, t_3, units: tl.constexpr,
    WARPS: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """acc [16 · WARPS, N] + blocks begin to end - 1 of each warp's tile times a tile of N rows of x."""
    columns: tl.constexpr = acc.shape[1]
    m, lane = tl.arange(0, columns)[:, None], tl.arange(0, 32 * WARPS) % 32
    for at in tl.range(begin, end, EACH, num_stages=STAGES):
        for turn in tl.static_range(EACH):
            block = at + turn
            w = fetch_tile(w_words, w_high, w_scales, w_shared, tile, block, lane, units, GROUP, FORM, SCALES)
            some, sums = x + (block * columns + m) * 128, x_sums + (block * columns + m) * 16
            acc = add_block(acc, w, some, sums, t_0, t_1, t_2, t_3, WARPS, OFFSET, GROUP, FORM, SCALES)
    return acc


@triton.jit
def write_sums(
    acc, first_row, y, x_scales, bias, residual, x_rows, y_stride, residual_stride, rows,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sums of all rows of x, times their scales, with what is added to them."""
    n, m = first_row + tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    is_out = (m < x_rows) & (n < rows)
    acc *= tl.load(x_scales + m, mask=m < x_rows, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < rows, other=0.0)
    if HAS_RESIDUAL:
        acc += tl.load(residual + m * residual_stride + n, mask=is_out, other=0.0)
    tl.store(y + m * y_stride + n, acc, mask=is_out)


@triton.jit
def several_kernel(
    x, x_sums, x_scales, w_words, w_high, w_scales, w_shared, y, bias, residual, parts, arrivals,
    x_rows, y_stride, residual_stride, rows, last_tile, t_0, t_1, t_2, t_3,
    units: tl.constexpr, blocks_each: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, SPLITS: tl.constexpr,
    EACH: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] (+ bias[n]) (+ residual[m, n]) for 16 · WARPS rows n, and N rows m at most.

    SPLITS programs have the same rows, `blocks_each` blocks each. parts: [programs, SPLITS, rows, N].
    """
    size: tl.constexpr = 16 * WARPS * N
    program, split = tl.program_id(0), tl.program_id(1)
    tile = tl.minimum(program * WARPS + tl.arange(0, 32 * WARPS) // 32, last_tile).to(tl.int64)
    begin = split * blocks_each
    end = tl.minimum(begin + blocks_each, units // 4)
    t_0, t_1, t_2, t_3 = table_without_signs(t_0, t_1, t_2, t_3, FORM, OFFSET)
    if EARLY > 0:
        prefetch(w_words, tile, begin, end, units, EARLY, WARPS, FORM)
    wait()
    acc = add_blocks(
        tl.zeros([16 * WARPS, N], tl.float32), x, x_sums, w_words, w_high, w_scales, w_shared, tile, begin, end,
        t_0, t_1, t_2, t_3, units, WARPS, EACH, STAGES, OFFSET, GROUP, FORM, SCALES,
    )  # fmt: skip
    first = program * (16 * WARPS)
    if SPLITS == 1:
        write_sums(
            acc, first, y, x_scales, bias, residual, x_rows, y_stride, residual_stride, rows, HAS_BIAS, HAS_RESIDUAL
        )
    else:
        own = parts + program.to(tl.int64) * (SPLITS * size)
        own += tl.arange(0, 16 * WARPS)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(own + split * size, acc)
        tl.debug_barrier()  # all threads have written before one says so
        if tl.atomic_add(arrivals + program, 1) == SPLITS - 1:
            tl.store(arrivals + program, 0)
            total = tl.load(own, cache_modifier=".cg")  # from the second-level cache: others have written it
            for other in tl.static_range(1, SPLITS):
                total += tl.load(own + other * size, cache_modifier=".cg")
            write_sums(
                total, first, y, x_scales, bias, residual, x_rows, y_stride, residual_stride, rows, HAS_BIAS,
                HAS_RESIDUAL,
            )  # fmt: skip


def splits_of(packed: Packed) -> tuple[int, int]:
    """Programs that share rows of a matrix, and blocks of each; sums of a row depend on it."""
    blocks, programs = packed.units // BLOCK_UNITS, -(-packed.rows // (WARPS * TILE_ROWS))
    splits = max(1, min(PROGRAMS // programs, MAX_SPLITS, blocks // 2))
    each = -(-blocks // splits)
    return -(-blocks // each), each


def multiply(x: Several, packed: Packed, y: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
    """y = x · weightᵀ (+ bias) (+ residual), a tile of x after another. y, residual: float32 [rows of x, rows]."""
    for number in range(len(x.words)):
        rows = slice(number * x.together, (number + 1) * x.together)
        multiply_tile(x.tile(number), packed, y[rows], bias, None if residual is None else residual[rows])


def multiply_tile(x: Several, packed: Packed, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """`multiply` of 1 to 32 rows in one tile."""
    layout, together = packed.layout, x.together
    programs = -(-packed.rows // (WARPS * TILE_ROWS))
    splits, each = splits_of(packed)
    are_pairs = each % 2 == 0 and packed.units % (2 * BLOCK_UNITS) == 0
    parts = y
    if splits > 1:
        parts = torch.empty(programs * splits * WARPS * TILE_ROWS * together, dtype=torch.float32, device=y.device)
    several_kernel[(programs, splits)](
        x.words, x.sums, x.scales, packed.words, packed.high, packed.scales, packed.shared,
        y, y if bias is None else bias, y if residual is None else residual, parts, x.arrivals,
        len(x), y.stride(0), 0 if residual is None else residual.stride(0), packed.rows, len(packed.words) - 1,
        *layout.packed_table, units=packed.units, blocks_each=each, N=together, WARPS=WARPS, SPLITS=splits, EARLY=EARLY,
        **steps_of(together, are_pairs, layout.group), OFFSET=layout.offset,
        GROUP=layout.group, FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=WARPS, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip


def steps_of(together: int, are_pairs: bool, group: int) -> dict[str, int]:
    """Blocks of a step, and steps under way, as was fastest on an H200; no sum depends on them.

    are_pairs: whether every program has an even number of blocks.
    """
    if together == AT_ONCE and group > 16 and are_pairs:
        return {"EACH": 2, "STAGES": 3}
    return {"EACH": 1, "STAGES": 4}
