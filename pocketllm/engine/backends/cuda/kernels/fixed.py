"""Rows times a matrix in tiles of one size, whatever the number of rows: a row has the same bits beside any others.

A library picks tiles, and where sums are split, by the number of rows. Here a program has all of a sum, begun at its
first value.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED, wait

HALF = {"ROWS": 128, "COLS": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
"""Tile of two bytes a value: rows of x, rows of the matrix, and how much of them at a time; part of the numerics
version."""
NARROW = {"ROWS": 32, "COLS": 16, "DEPTH": 128, "num_warps": 4, "num_stages": 6}
"""The same for a few rows, which wait for the matrix's bytes alone."""
PLAIN = {"ROWS": 16, "COLS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 2}
"""The same where sums are of float32, which the tensor cores do not have."""
TOGETHER = tl.constexpr(8)
"""Tiles of x whose programs follow one another, so that they find the matrix's rows in the second-level cache."""


@triton.jit
def fixed_kernel(
    x, w, y, x_rows, rows, x_stride, y_stride, width: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ x[m] · w[n] in float32; w: [rows, width], its rows contiguous. IS_PLAIN: of values in float32."""
    wait()
    program, across = tl.program_id(0), tl.cdiv(rows, COLS)
    first = program // (TOGETHER * across) * TOGETHER
    beside = tl.minimum(tl.cdiv(x_rows, ROWS) - first, TOGETHER)
    within = program % (TOGETHER * across)
    m = (first + within % beside) * ROWS + tl.arange(0, ROWS)
    n, k = within // beside * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)[None, :]
    own_x, is_x = x + m.to(tl.int64)[:, None] * x_stride + k, (m < x_rows)[:, None]
    own_w, is_w = w + n.to(tl.int64)[:, None] * width + k, (n < rows)[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for at in tl.range(0, width, DEPTH):
        of_x, of_w = is_x, is_w
        if width % DEPTH != 0:
            of_x, of_w = is_x & (k < width - at), is_w & (k < width - at)
        some_x = tl.load(own_x + at, mask=of_x, other=0.0)
        some_w = tl.load(own_w + at, mask=of_w, other=0.0)
        if IS_INTERPRETED:  # which has no products of bfloat16
            some_x, some_w = some_x.to(tl.float32), some_w.to(tl.float32)
        if IS_PLAIN:
            total = tl.dot(some_x, tl.trans(some_w.to(tl.float32)), total, input_precision="ieee")
        else:
            total = tl.dot(some_x, tl.trans(some_w), total)
    to = y + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(to, total, mask=(m < x_rows)[:, None] & (n < rows)[None, :])


def fixed_product(x: Tensor, weight: Tensor, tile: Mapping[str, int] = HALF) -> Tensor:
    """x · weightᵀ, summed and given in float32: of float16 or bfloat16 both, or of a float32 x and whatever floats.

    tile: of two bytes a value; float32 has one of its own.
    """
    (count, width), rows = x.shape, len(weight)
    y = torch.empty(count, rows, dtype=torch.float32, device=x.device)
    is_plain = x.dtype == torch.float32
    tile = PLAIN if is_plain else tile
    fixed_kernel[(-(-count // tile["ROWS"]) * -(-rows // tile["COLS"]),)](
        x, weight, y, count, rows, x.stride(0), y.stride(0), width=width, IS_PLAIN=is_plain, **tile
    )
    return y


def narrow_product(x: Tensor, weight: Tensor) -> Tensor:
    """`fixed_product` of a few rows, in a tile of their own."""
    return fixed_product(x, weight, NARROW)
