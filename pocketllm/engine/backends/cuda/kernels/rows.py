"""Rows of activations, normed or gated: as float32, as float16 times one number, or as sixteen bits for each unit."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.several import Several
from pocketllm.engine.backends.cuda.kernels.words import FLOAT_OF_INT, SECOND
from pocketllm.engine.backends.cuda.packing import units_of

FLOAT, HALF, UNITS, SEVERAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NO_GATE, SILU, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SIGMOID, PRODUCT = tl.constexpr(3), tl.constexpr(4)
BOUNDED, LIMITED = tl.constexpr(5), tl.constexpr(6)
"""Gates that limit both halves: of gpt-oss, and of DeepSeek V4."""
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
def gated_by(gate, up, slope, limit, GATE: tl.constexpr):
    """What a gate lets through: activated(gate) · up, or with g = min(gate, limit) and u = up within ±limit
    g · sigmoid(slope · g) · (u + 1) or silu(g) · u."""
    if (GATE == BOUNDED) or (GATE == LIMITED):
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if GATE == BOUNDED:
        return gate / (1 + tl.exp(-slope * gate)) * (up + 1)
    elif GATE == LIMITED:
        return activated(gate, SILU) * up
    else:
        return activated(gate, GATE) * up


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
def write_several(out, out_sums, out_scales, value, row, place, units, N: tl.constexpr):
    """A row as float16 times a power of two; of each half of a unit its sum as two float16, the second what the first
    lacks (`several`).

    value: [lines, 32], whole units of the row; it ends at `units`. place: where among tiles of N rows it goes, row:
    where its power does; out, out_sums: pairs of float16. Of each half of a unit values lie as 16 columns of a
    fragment, 0 and 2 of each thread's four and then 1 and 3; second halves are a sixteenth as large, as their codes are
    SECOND times too large.
    """
    lines: tl.constexpr = value.shape[0]
    # the largest becomes 1024 to 2048: sums of 16 stay in range
    exponent = (tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23) - 137
    exponent = tl.minimum(tl.maximum(exponent, -120), 116)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    is_first = (tl.arange(0, 32) < 16)[None, :]
    codes = (value * inverse * tl.where(is_first, 1.0, 1.0 / SECOND)).to(tl.float16)
    halves = tl.sum(tl.reshape(codes.to(tl.float32) * tl.where(is_first, 1.0, SECOND), [lines, 2, 16]), 2)
    line, w = tl.arange(0, lines)[:, None], tl.arange(0, 16)[None, :]
    block = (place // N) * (units // 4) * N + line // 4 * N + place % N
    bits = codes.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.reshape(bits, [lines, 2, 4, 2, 2])  # half, thread, place in its pair, pair
    words = tl.sum(bits << (16 * tl.arange(0, 2))[None, None, None, :, None], 3)
    words = tl.reshape(tl.permute(words, (0, 1, 3, 2)), [lines, 16])  # as they are written: four at once
    tl.store(out + (block * 64 + line % 4 * 16 + w), words, mask=(line < units) & (w >= 0))
    high = halves.to(tl.float16)
    low = (halves - high.to(tl.float32)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    both = (high.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | low
    to = block * 8 + line % 4 + tl.arange(0, 2)[None, :] * 4
    tl.store(out_sums + to, both, mask=(line < units) & (to >= 0))
    tl.store(out_scales + row, ((127 + exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def rows_kernel(
    x, up, weight, out, out_scales, out_sums, arrivals, x_stride, up_stride, width, units, eps, limit,
    LINES: tl.constexpr, OUT: tl.constexpr, GATE: tl.constexpr, HAS_NORM: tl.constexpr, N: tl.constexpr,
    COUNTERS: tl.constexpr,
):  # fmt: skip
    """One chunk of one row as LINES lines of 32 values; out: contiguous rows, scales of rows or marks of units.

    Of SEVERAL rows the first sets the counters of products to 0.
    """
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = chunk * LINES + tl.arange(0, LINES)
    at = line[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = at < width
    value = tl.load(x + row * x_stride + at, mask=is_in, other=0.0)
    if GATE != NO_GATE:
        value = gated_by(value, tl.load(up + row * up_stride + at, mask=is_in, other=0.0), 0.0, limit, GATE)
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
    elif OUT == SEVERAL:
        if row == 0:
            tl.store(arrivals + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
        write_several(out, out_sums, out_scales, value, row, row, units, N)
    else:
        write_bytes(out, out_scales, value, line, units)


def write_rows(
    out: Tensor | Several,
    x: Tensor,
    *,
    scales: Tensor | None = None,
    up: Tensor | None = None,
    gate: int = 0,
    limit: float = 0.0,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """out = rows of x (gated by `up`, or normed by `weight`), in the form that out says.

    x, up: float32 [rows, width], each row contiguous; out: `Several`, or float32, float16 (scales: [rows]), both [rows,
    width], or int32: of a single row the words of `write_bytes` (scales: their marks).
    """
    import torch

    rows, width = x.shape
    if isinstance(out, Several):
        form, together, counters = SEVERAL.value, out.together, len(out.arrivals)
        targets = (*out.as_written, out.arrivals)
    else:
        form, together, counters = {torch.float32: 0, torch.float16: 1, torch.int32: 2}[out.dtype], 1, 1
        targets = out, out if scales is None else scales, out, out
        assert form != UNITS.value or rows == 1, rows
    units = units_of(width) if form >= UNITS.value else -(-width // 32)
    lines = triton.next_power_of_2(units)
    if weight is None and form in (FLOAT.value, UNITS.value):
        lines = min(lines, CHUNK // 32)
    # several rows leave most multiprocessors without work: one with more warps is sooner done
    warps = 4 if lines <= 64 else 8 if lines <= 128 else 16
    rows_kernel[(rows, -(-units // lines))](
        x, x if up is None else up, x if weight is None else weight, *targets, x.stride(0),
        0 if up is None else up.stride(0), width, units, eps, limit,
        LINES=lines, OUT=form, GATE=gate, HAS_NORM=weight is not None, N=together,
        COUNTERS=counters, num_warps=warps * 2 if form == SEVERAL.value else warps,
    )  # fmt: skip
