"""Rows rotated by a Walsh-Hadamard matrix, by sums and differences of halves (Fino & Algazi 1976)."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def hadamard_kernel(
    x, signs, out, x_stride, width,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, IS_INVERSE: tl.constexpr,
):  # fmt: skip
    """One run of BLOCK = 2^LEVELS values of a row; out: contiguous."""
    wait()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value, sign = tl.load(x + row * x_stride + at), tl.load(signs + at)
    if not IS_INVERSE:
        value = value * sign
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(value, [1 << level, 2, BLOCK >> (level + 1)]), (0, 2, 1))
        first, second = tl.split(pairs)
        value = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), [BLOCK])
    value = value / tl.sqrt(float(BLOCK))
    if IS_INVERSE:
        value = value * sign
    tl.store(out + row * width + at, value)
