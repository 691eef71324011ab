"""Rows of activations, normed or gated: as float32, as float16 times one number, or as sixteen bits for each unit."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import FLOAT_OF_INT, SECOND
from pocketllm.engine.backends.cuda.packing import units_of

FLOAT, HALF, UNITS, EIGHTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NO_GATE, SILU, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SIGMOID, PRODUCT = tl.constexpr(3), tl.constexpr(4)
LARGEST = tl.constexpr(32511.0)
"""Of an integer whose two signed bytes are upper · 256 + lower."""
CHUNK = 1024
"""Values of a row that one program takes when it need not see the whole row."""


@triton.jit
def exponential_tanh(z):
    """tanh by one exponential; exact at both ends."""
    return 1 - 2 / (tl.exp(2 * z) + 1)


@triton.jit
def activated(gate, GATE: tl.constexpr):
    """silu, gelu in its tanh form, a sigmoid, or the gate as it is."""
    if GATE == SILU:
        return gate / (1 + tl.exp(-gate))
    elif GATE == SIGMOID:
        return 1 / (1 + tl.exp(-gate))
    elif GATE == PRODUCT:
        return gate
    else:
        return 0.5 * gate * (1 + exponential_tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def write_bytes(out, out_marks, value, line, units):
    """Units of 32 values of a single row as sixteen bits, in two bytes each: of each unit its scale, its sum and its
    halves' sums. Of a block [4 places, 2 halves, 2 levels, 4 units] words of four neighbors, upper level first."""
    lines: tl.constexpr = value.shape[0]
    largest = tl.max(tl.abs(value), 1)
    inverse = tl.where(largest > 0, LARGEST / largest, 0.0)
    # the float 12582912 + integer has the integer, rounded to the nearest, in its low bits
    codes = (value * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) - FLOAT_OF_INT
    upper = (codes + 128) >> 8
    shifts = (8 * tl.arange(0, 4))[None, None, :]
    is_in, w = line < units, tl.arange(0, 8)[None, :]
    to = (line // 4 * 64 + line % 4)[:, None] + w % 4 * 16 + w // 4 * 8
    words = tl.sum(tl.reshape(upper & 255, [lines, 8, 4]) << shifts, 2)
    tl.store(out + to, words, mask=is_in[:, None])
    words = tl.sum(tl.reshape(codes & 255, [lines, 8, 4]) << shifts, 2)
    tl.store(out + to + 4, words, mask=is_in[:, None])
    halves = tl.sum(tl.reshape(codes, [lines, 2, 16]), 2).to(tl.float32)
    tl.store(out_marks + line * 4, largest / LARGEST, mask=is_in)
    tl.store(out_marks + line * 4 + 1, tl.sum(halves, 1), mask=is_in)
    tl.store(out_marks + line[:, None] * 4 + 2 + tl.arange(0, 2)[None, :], halves, mask=is_in[:, None])


@triton.jit
def write_halves(out, out_marks, value, row, line, units):
    """Units of 32 values of rows as float16 times a power of two; of each unit that, its sum and its halves' sums.

    Eight rows lie together, of each unit [8 rows, 4 threads, 4 words]: what a thread of `mma` reads of a row, pairs of
    values 0 and 2 then 1 and 3 of its four, and of the four that are 16 on, those a sixteenth as large (`fragments`).
    Marks: of each unit and pair of rows two of each kind. line: which unit each is; from `units` on nothing is written.
    """
    lines: tl.constexpr = value.shape[0]
    largest = tl.max(tl.abs(value), 1)
    # the largest becomes 32 to 64: a unit's products stay in range whatever it holds
    exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 132, -120), 120)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    is_first = (tl.arange(0, 32) < 16)[None, :]
    codes = (value * inverse[:, None] * tl.where(is_first, 1.0, 1.0 / SECOND)).to(tl.float16)
    halves = tl.sum(tl.reshape(codes.to(tl.float32) * tl.where(is_first, 1.0, SECOND), [lines, 2, 16]), 2)
    bits = codes.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.reshape(bits, [lines, 2, 4, 2, 2])  # half, thread, place in its pair, pair
    words = tl.reshape(tl.sum(bits << (16 * tl.arange(0, 2))[None, None, None, :, None], 3), [lines, 16])
    w = tl.arange(0, 16)[None, :]  # half, thread, pair
    is_in = line < units
    block, place = row // 8 * units + line, row % 8
    to = block[:, None] * 128 + place[:, None] * 16 + w // 2 % 4 * 4 + w // 8 * 2 + w % 2
    tl.store(out + to, words, mask=is_in[:, None])
    mark = block * 32 + place // 2 * 8 + place % 2
    tl.store(out_marks + mark, ((127 + exponent) << 23).to(tl.float32, bitcast=True), mask=is_in)
    tl.store(out_marks + mark + 2, tl.sum(halves, 1), mask=is_in)
    tl.store(out_marks + mark[:, None] + 4 + 2 * tl.arange(0, 2)[None, :], halves, mask=is_in[:, None])


@triton.jit
def write_eights(out, out_sums, out_scales, value, row, units):
    """A row as float16 times a power of two; of each half of a unit its sum as two float16, the second what the first
    lacks.

    Words lie as those of `write_halves`; of sums [eights, blocks, 8 rows, 4 units, 2 halves] (`several`).
    value: [lines, 32]; rows end at `units`.
    """
    lines: tl.constexpr = value.shape[0]
    # the largest becomes 1024 to 2048: sums of 16 stay in range
    exponent = (tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23) - 137
    exponent = tl.minimum(tl.maximum(exponent, -120), 116)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    is_first = (tl.arange(0, 32) < 16)[None, :]
    codes = (value * inverse * tl.where(is_first, 1.0, 1.0 / SECOND)).to(tl.float16)
    halves = tl.sum(tl.reshape(codes.to(tl.float32) * tl.where(is_first, 1.0, SECOND), [lines, 2, 16]), 2)
    line = tl.arange(0, lines)
    is_in = (line < units)[:, None]
    block, place = row // 8, row % 8
    w = tl.arange(0, 16)[None, :]  # half, thread, pair
    to = block * (units * 128) + line[:, None] * 128 + place * 16 + w // 2 % 4 * 4 + w // 8 * 2 + w % 2
    bits = codes.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.reshape(bits, [lines, 2, 4, 2, 2])  # half, thread, place in its pair, pair
    words = tl.reshape(tl.sum(bits << (16 * tl.arange(0, 2))[None, None, None, :, None], 3), [lines, 16])
    tl.store(out + to, words, mask=is_in)
    high = halves.to(tl.float16)
    low = (halves - high.to(tl.float32)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    both = (high.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | low
    to = block * (units * 16) + (line // 4 * 64 + line % 4 * 2)[:, None] + place * 8 + tl.arange(0, 2)[None, :]
    tl.store(out_sums + to, both, mask=is_in)
    tl.store(out_scales + row, ((127 + exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def rows_kernel(
    x, up, weight, out, out_scales, out_sums, x_stride, up_stride, width, units, eps,
    LINES: tl.constexpr, OUT: tl.constexpr, GATE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One chunk of one row as LINES lines of 32 values; out: contiguous rows, scales of rows or marks of units."""
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = chunk * LINES + tl.arange(0, LINES)
    at = line[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = at < width
    value = tl.load(x + row * x_stride + at, mask=is_in, other=0.0)
    if GATE != NO_GATE:
        value = activated(value, GATE) * tl.load(up + row * up_stride + at, mask=is_in, other=0.0)
    if HAS_NORM:
        mean = tl.sum(tl.sum(value * value, 1), 0) / width
        value = value * (1 / tl.sqrt(mean + eps)) * tl.load(weight + at, mask=is_in, other=0.0)
    if OUT == FLOAT:
        tl.store(out + row * width + at, value, mask=is_in)
    elif OUT == HALF:
        # the largest becomes 32 to 64: products of float16 stay in range whatever the row holds
        exponent = (tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23) - 132
        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
        inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(out + row * width + at, (value * inverse).to(tl.float16), mask=is_in)
        tl.store(out_scales + row, ((127 + exponent) << 23).to(tl.float32, bitcast=True))
    elif OUT == EIGHTS:
        write_eights(out, out_sums, out_scales, value, row, units)
    else:
        write_bytes(out, out_scales, value, line, units)


def write_rows(
    out: Tensor,
    x: Tensor,
    *,
    scales: Tensor | None = None,
    sums: Tensor | None = None,
    up: Tensor | None = None,
    gate: int = 0,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """out = rows of x (gated by `up`, or normed by `weight`), in the form that out's dtype says.

    x, up: float32 [rows, width], each row contiguous; out: float32, float16 (scales: [rows]), both [rows, width], or
    int32: of a single row the words of `write_bytes` (scales: their marks), or with `sums` those of `write_eights`
    (scales: [rows]), rows padded to whole eights.
    """
    import torch

    rows, width = x.shape
    form = {torch.float32: 0, torch.float16: 1, torch.int32: 2}[out.dtype]
    form = 3 if sums is not None else form
    assert form != 2 or rows == 1, rows
    whole_row = weight is not None or form in (1, 3)
    units = units_of(width) if form >= 2 else -(-width // 32)
    lines = triton.next_power_of_2(units)
    if not whole_row:
        lines = min(lines, CHUNK // 32)
    rows_kernel[(rows, -(-units // lines))](
        x, x if up is None else up, x if weight is None else weight, out, out if scales is None else scales,
        out if sums is None else sums, x.stride(0), 0 if up is None else up.stride(0), width, units, eps,
        LINES=lines, OUT=form, GATE=gate, HAS_NORM=weight is not None,
        num_warps=4 if lines <= 64 else 8 if lines <= 128 else 16,
    )  # fmt: skip
