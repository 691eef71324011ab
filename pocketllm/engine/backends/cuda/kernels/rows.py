"""Rows of activations: normed or gated, and written as float32, as float16 with a power of two, or as int8."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import FLOAT_OF_INT
from pocketllm.engine.backends.cuda.packing import units_of

FLOAT, HALF, BYTES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_GATE, SILU, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CHUNK = 1024
"""Values of a row that one program takes when it need not see the whole row."""


@triton.jit
def exponential_tanh(z):
    """tanh by one exponential; exact at both ends."""
    return 1 - 2 / (tl.exp(2 * z) + 1)


@triton.jit
def activated(gate, GATE: tl.constexpr):
    """silu, or gelu in its tanh form."""
    if GATE == SILU:
        return gate / (1 + tl.exp(-gate))
    else:
        return 0.5 * gate * (1 + exponential_tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def write_bytes(out, out_marks, value, row, line, units, IN_FRAGMENTS: tl.constexpr):
    """Units of 32 values of a row as int8 in words of four; of each unit its scale, its sum and its halves' sums.

    line: which unit each is; from `units` on nothing is written.
    """
    largest = tl.max(tl.abs(value), 1)
    inverse = tl.where(largest > 0, 127 / largest, 0.0)
    # the float 12582912 + integer has the integer, rounded to the nearest, in its low bits
    codes = (value * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    places = (8 * tl.arange(0, 4))[None, None, :]
    words = tl.sum(tl.reshape(codes & 255, [value.shape[0], 8, 4]) << places, 2)
    second = tl.arange(0, 2)[None, :]
    halves = tl.sum(tl.reshape(codes - FLOAT_OF_INT, [value.shape[0], 2, 16]), 2).to(tl.float32)
    w = tl.arange(0, 8)[None, :]
    is_in = line < units
    if IN_FRAGMENTS:
        # eight rows together; of each unit, what a thread of `mma` reads: 4 values, and the 4 that are 16 on
        block, place = row // 8 * units + line, row % 8
        to = block[:, None] * 64 + (place * 4 + w % 4) * 2 + w // 4
        mark, step = block * 32 + place // 2 * 8 + place % 2, 2  # two rows' scales, sums, halves' sums
    else:
        # as a matrix lies: the first halves of all units, then the second ones, by blocks and places
        to = row * units * 8 + w // 4 * (units * 4) + (line[:, None] // 4 * 4 + w % 4) * 4 + line[:, None] % 4
        mark, step = (row * units + line) * 4, 1
    tl.store(out + to, words, mask=is_in[:, None])
    tl.store(out_marks + mark, largest / 127, mask=is_in)
    tl.store(out_marks + mark + step, tl.sum(halves, 1), mask=is_in)
    tl.store(out_marks + mark[:, None] + step * (2 + second), halves, mask=is_in[:, None])


@triton.jit
def rows_kernel(
    x, up, weight, out, out_scales, x_stride, up_stride, width, units, eps,
    LINES: tl.constexpr, OUT: tl.constexpr, GATE: tl.constexpr, HAS_NORM: tl.constexpr, IN_FRAGMENTS: tl.constexpr,
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
    else:
        write_bytes(out, out_scales, value, row, line, units, IN_FRAGMENTS)


def write_rows(
    out: Tensor,
    x: Tensor,
    *,
    scales: Tensor | None = None,
    up: Tensor | None = None,
    gate: int = 0,
    weight: Tensor | None = None,
    eps: float = 0.0,
    in_fragments: bool = False,
) -> None:
    """out = rows of x (gated by `up`, or normed by `weight`), in the form that out's dtype says.

    x, up: float32 [rows, width], each row contiguous; out: float32, float16 (scales: [rows]), both [rows, width], or
    int32, the int8 of `write_bytes` in words of four (scales: their marks). in_fragments: in the order in which `mma`
    reads it, rows padded to whole eights.
    """
    import torch

    rows, width = x.shape
    form = {torch.float32: 0, torch.float16: 1, torch.int32: 2}[out.dtype]
    whole_row = weight is not None or form == 1
    units = units_of(width) if form == 2 else -(-width // 32)
    lines = triton.next_power_of_2(units)
    if not whole_row:
        lines = min(lines, CHUNK // 32)
    rows_kernel[(rows, -(-units // lines))](
        x, x if up is None else up, x if weight is None else weight, out, out if scales is None else scales,
        x.stride(0), 0 if up is None else up.stride(0), width, units, eps,
        LINES=lines, OUT=form, GATE=gate, HAS_NORM=weight is not None, IN_FRAGMENTS=in_fragments,
        num_warps=4 if lines <= 64 else 8 if lines <= 128 else 16,
    )  # fmt: skip
