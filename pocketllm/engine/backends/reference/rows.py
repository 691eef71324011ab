"""Row counts at which a matrix product gives each row the same bits, whatever rows stand beside it.

A BLAS picks its kernel by the shape: one row goes to a matrix-vector routine, and leftovers of a few rows to kernels
that add in another order. With MKL on x86-64, told to be strict (`device.settle_sums`), 4, 8 and every count from 12 on
give identical rows, and no other does; so fewer rows are padded up. That makes a single row dearer
(docs/decisions/0003), and in return eight concurrent requests get exactly the tokens that each gets alone.
"""

import torch
from torch import Tensor
from torch.nn import functional

ANY_FROM = 12
"""From this many rows on, no padding is needed."""
WIDE_FROM = 24
"""From this many columns of a result on, no padding is needed."""


def padded(rows: int) -> int:
    """Rows to compute so that each comes out as it would beside any neighbors."""
    return rows if rows >= ANY_FROM else -(-rows // 4) * 4


def pad_rows(x: Tensor) -> Tensor:
    """x with zero rows below, as many as `padded` asks for. x: [..., rows, width]."""
    rows = x.shape[-2]
    more = padded(rows) - rows
    return functional.pad(x, (0, 0, 0, more)) if more else x


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, of rows that `pad_rows` gave: [rows, in] → [rows, out], the same bits for a row beside any others.

    A narrower result is another kernel's from as many rows on as it has columns, with two threads of a processor that
    has nothing beyond AVX2; so it is computed with zero columns beside.
    """
    out = len(weight)
    if out >= WIDE_FROM:
        return functional.linear(x, weight)
    return functional.linear(x, functional.pad(weight, (0, 0, 0, WIDE_FROM - out)))[..., :out].contiguous()


def rows_are_invariant() -> bool:
    """Measure on this machine, in milliseconds, that the rule above holds for its BLAS."""
    generator = torch.Generator().manual_seed(0)
    for width, out in ((576, 192), (64, 96), (77, 33), (64, 24), (64, 16)):
        weight = torch.randn(out, width, generator=generator)
        x = torch.randn(300, width, generator=generator)
        expected = torch.cat([product(x[at : at + 4], weight) for at in range(0, 300, 4)])
        for rows in (8, 12, 13, 15, 17, 18, 31, 64, 65, 127, 256, 299, 300):
            if not torch.equal(product(x[:rows], weight), expected[:rows]):
                return False
    return True
