"""Each head of a few rows through a matrix of its own, of plain floats."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def heads_product_kernel(
    x, w, y, x_stride, tokens, heads, rows, TILE: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr
):
    """y[t, h] = w[h] · x[t, h] in float32 for TILE values of one head: read once, then one row after another.

    x: [tokens, heads · WIDTH]; w: [heads, rows, WIDTH]; y: [tokens, heads · rows].
    """
    n, head = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    i = tl.arange(0, LINE)
    is_in = (n < rows)[:, None] & (i < WIDTH)[None, :]
    own = tl.load(w + (head.to(tl.int64) * rows + n)[:, None] * WIDTH + i[None, :], mask=is_in, other=0.0)
    own = own.to(tl.float32)
    wait()
    for token in range(tokens):
        value = tl.load(x + token * x_stride + head * WIDTH + i, mask=i < WIDTH, other=0.0)
        total = tl.sum(own * value[None, :], 1)
        tl.store(y + (token * heads + head) * rows + n, total, mask=n < rows)
