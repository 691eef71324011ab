"""A single row times a packed matrix, every weight read once, and what follows where its sums are ready.

A value of x is sixteen bits, an upper and a lower byte, whose products with codes are exact integers (`dp4a`). A thread
works by itself: tensors have one element for each thread, and a warp has 16 rows of the matrix. A thread multiplies
words of one place of a block; sums over the four threads of a quad give each a unit, with whose scales it goes on.
Warps of a program share rows of the matrix, taking turns at its blocks, or have rows of their own, so that x is read
once for all of them. On the tensor cores, which have eight columns at least, a row alone took half as long again.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.fetch import fetch_tile, opened
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.rows import NO_GATE, gated_by, write_bytes
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
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS, UNIT
from pocketllm.engine.backends.cuda.packing import Packed, units_of

MANY_ROWS = 16384
"""From here on there are warps enough without many of them sharing a row."""
NARROW = 64
"""Units of a row below which fewer warps can share it."""


@dataclass
class Halves:
    """A row of x in sixteen bits as products read it (`rows.write_bytes`), a factor for it still to come.

    words: int32 [1, units · 16]; marks: float32 [1, units · 4].
    """

    words: Tensor
    marks: Tensor
    squares: Tensor | None = None
    """[rows, width / 32]: Σ of 32 squares each; the factor is 1 / sqrt(their mean + eps)"""
    eps: float = 0.0


@dataclass(frozen=True)
class Next:
    """What is written beside y where a norm follows: y · weight in the form of `Halves`, with squares."""

    weight: Tensor
    halves: Halves


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


@triton.jit
def tile_at(number, TILES: tl.constexpr, out_width, last_tile, GATE: tl.constexpr):
    """Where in the matrix a program's tiles are; past the end, the last one again."""
    own = tl.program_id(0) * TILES + number
    if GATE != NO_GATE:
        each: tl.constexpr = TILES // 2
        own = number // each * (out_width // 16) + tl.program_id(0) * each + number % each
    return tl.minimum(own, last_tile).to(tl.int64)


@triton.jit
def write_next(out, out_marks, value, units):
    """A program's part of the row for the next product: value [1, whole units]."""
    lines: tl.constexpr = value.shape[1] // 32
    line = tl.program_id(0) * lines + tl.arange(0, lines)
    write_bytes(out, out_marks, tl.reshape(value, [lines, 32]), line, units)


@triton.jit
def fill_up(out, out_marks, width, units):
    """Zeros from the row's last unit up to the end of its last block, by the program with that unit."""
    after = width // 32 + tl.arange(0, 4)
    after = tl.where(tl.program_id(0) == tl.num_programs(0) - 1, after, units)
    write_bytes(out, out_marks, tl.zeros([4, 32], tl.float32), after, units)


@triton.jit
def finish(
    result, y, bias, residual, squares, next_weight, out, out_marks, out_squares,
    rows, width, eps, limit, out_width, out_units,
    SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_NEXT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """What is done with a row's sums, [1, rows of the program], before they are written."""
    count: tl.constexpr = result.shape[1]
    n = tl.program_id(0) * count + tl.arange(0, count)
    if GATE != NO_GATE:
        part = tl.arange(0, count) // (count // 2)
        n = part * out_width + tl.program_id(0) * (count // 2) + tl.arange(0, count) % (count // 2)
    is_out = (n < rows)[None, :]
    if HAS_FACTOR:
        s = tl.arange(0, SQUARES)[None, :]
        of_row = tl.load(squares + s, mask=s < width // 32, other=0.0)
        result *= (1 / tl.sqrt(tl.sum(of_row, 1) / width + eps))[:, None]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0)[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + n[None, :], mask=is_out, other=0.0)
    if GATE == NO_GATE:
        tl.store(y + n[None, :], result, mask=is_out)
        if HAS_NEXT:
            lines: tl.constexpr = count // 32
            sums = tl.sum(tl.reshape(result * result, [1, lines, 32]), 2)
            line = tl.program_id(0) * lines + tl.arange(0, lines)
            tl.store(out_squares + line[None, :], sums)
            write_next(out, out_marks, result * tl.load(next_weight + n)[None, :], out_units)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(result, [1, 2, count // 2]), (0, 2, 1)))
        write_next(out, out_marks, gated_by(gate, up, 0.0, limit, GATE), out_units)
    if HAS_NEXT and out_units * 32 != out_width:
        fill_up(out, out_marks, out_width, out_units)


@triton.jit
def single_kernel(
    x, marks, squares, w_words, w_high, w_scales, w_shared, y, bias, residual, next_weight, out, out_marks, out_squares,
    rows, last_tile, width, eps, limit, t_0, t_1, t_2, t_3,
    units: tl.constexpr, out_width: tl.constexpr, out_units: tl.constexpr, SQUARES: tl.constexpr, OFFSET: tl.constexpr,
    TILES: tl.constexpr, SHARES: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_NEXT: tl.constexpr, GATE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y[n] = Σ w[n] · x for TILES · 16 rows n, SHARES warps for each 16.

    GATE: half of a program's tiles are of the matrix's first half and half of its second, which are gates and what they
    let through. Weights of AHEAD blocks are under way while one is multiplied.
    """
    blocks: tl.constexpr = units // 4
    is_even: tl.constexpr = blocks % (SHARES * AHEAD) == 0
    threads: tl.constexpr = 32 * TILES * SHARES
    thread = tl.arange(0, threads)
    warp, lane, place = thread // 32, thread % 32, thread % 4
    share = warp // TILES
    tile = tile_at(warp % TILES, TILES, out_width, last_tile, GATE)
    zero = tl.zeros([threads], tl.float32)
    sums = (zero, zero)
    w_0 = fetch_tile(w_words, w_high, w_scales, w_shared, tile, share, lane, units, GROUP, FORM, SCALES)
    w_1, w_2, w_3 = w_0, w_0, w_0
    if AHEAD > 1:
        at = share + SHARES
        w_1 = fetch_tile(w_words, w_high, w_scales, w_shared, tile, at, lane, units, GROUP, FORM, SCALES)
    if AHEAD > 2:
        at = share + 2 * SHARES
        w_2 = fetch_tile(w_words, w_high, w_scales, w_shared, tile, at, lane, units, GROUP, FORM, SCALES)
        w_3 = fetch_tile(w_words, w_high, w_scales, w_shared, tile, at + SHARES, lane, units, GROUP, FORM, SCALES)
    wait()
    own_x, own_marks = x + place * 16, marks + place * 4
    for begin in tl.range(0, blocks, SHARES * AHEAD):
        for turn in tl.static_range(AHEAD):
            w = w_0 if turn == 0 else w_1 if turn == 1 else w_2 if turn == 2 else w_3
            at = begin + turn * SHARES + share
            later = w
            if blocks > SHARES * AHEAD:
                after = at + AHEAD * SHARES
                later = fetch_tile(w_words, w_high, w_scales, w_shared, tile, after, lane, units, GROUP, FORM, SCALES)
            block = tl.minimum(at, blocks - 1)
            sums = add_block_to_one(
                sums, w, own_x + block * 64, own_marks + block * 16, at < blocks, place, t_0, t_1, t_2, t_3,
                OFFSET, GROUP, FORM, SCALES, is_even,
            )  # fmt: skip
            if turn == 0:
                w_0 = later
            elif turn == 1:
                w_1 = later
            elif turn == 2:
                w_2 = later
            else:
                w_3 = later
    finish(
        row_of(sums, TILES, SHARES), y, bias, residual, squares, next_weight, out, out_marks, out_squares,
        rows, width, eps, limit, out_width, out_units, SQUARES, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR, HAS_NEXT, GATE,
    )  # fmt: skip


def multiply(
    x: Halves,
    packed: Packed,
    y: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    following: Next | None = None,
    gated: Halves | None = None,
    gate: int = 0,
    limit: float = 0.0,
    shape: tuple[int, int] | None = None,
) -> None:
    """y = x · weightᵀ (+ bias) (+ residual) of a single row, and more of it where asked.

    y, residual: float32 [1, rows]. following: also y for a product behind a norm; gated: instead of y, the
    matrix's first half of results as a gate of its second, in the form that the next product reads (`may_gate`).
    shape: tiles of 16 rows of a program, and warps for each.
    """
    layout = packed.layout
    tiles, shares = shape or shape_for(packed)
    if gated is not None or following is not None:
        tiles = 2 if gated is None else 4  # a unit of the next product's x each
    halves = gated if following is None else following.halves
    written = y if y is not None else x.marks
    out_width = packed.rows if gated is None else packed.rows // 2
    per_program = tiles * TILE_ROWS // (1 if gated is None else 2)
    single_kernel[(-(-out_width // per_program),)](
        x.words, x.marks, x.marks if x.squares is None else x.squares,
        packed.words, packed.high, packed.scales, packed.shared,
        written, written if bias is None else bias, written if residual is None else residual,
        written if following is None else following.weight,
        *((x.words, written) if halves is None else (halves.words, halves.marks)),
        written if halves is None or halves.squares is None else halves.squares,
        packed.rows, len(packed.words) - 1, packed.cols, x.eps, limit, *layout.packed_table,
        units=packed.units, out_width=0 if halves is None else out_width,
        out_units=0 if halves is None else units_of(out_width),
        SQUARES=1 if x.squares is None else triton.next_power_of_2(packed.cols // UNIT), OFFSET=layout.offset,
        TILES=tiles, SHARES=shares, GROUP=layout.group,
        FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_FACTOR=x.squares is not None, HAS_NEXT=halves is not None, GATE=gate if gated is not None else 0,
        AHEAD=blocks_ahead(packed, shares), num_warps=tiles * shares, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip


def may_gate(rows: int) -> bool:
    """Whether a matrix of so many rows can gate its second half by its first: programs have whole units of both."""
    return rows % (2 * UNIT) == 0


def may_hand_on(rows: int) -> bool:
    """Whether results of so many rows can be handed to a product behind a norm."""
    return rows % UNIT == 0


def shape_for(packed: Packed) -> tuple[int, int]:
    """Tiles of a program and warps for each, as they were fastest on an H200; sums of a row depend on the latter."""
    return (2, 2) if packed.rows >= MANY_ROWS else (2, 8 if packed.units >= NARROW else 4)


def blocks_ahead(packed: Packed, shares: int) -> int:
    """Blocks of weights that a warp has under way, as was fastest there: what registers allow. No sum depends on it."""
    most = 2 if packed.rows >= MANY_ROWS else 4
    own = -(-packed.units // 4 // shares)
    return next(ahead for ahead in (4, 2, 1) if ahead <= most and own % ahead == 0)
