"""Products of many rows with floats: x in the matrix's own type, as the tensor cores take both."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""x · weightᵀ, summed and given in float32: `library_product`, or `kernels.fixed.fixed_product`."""
FEWEST = 8
"""Rows of a product in float32: a library sums fewer in other ways."""


class Forms(Protocol):
    """What is needed of `products.Rows`."""

    def scaled(self) -> tuple[Tensor, Tensor]: ...

    def floats(self) -> Tensor: ...


def library_product(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ of one type of two bytes, or of a float32 x and whatever floats; summed and given in float32."""
    if x.dtype == torch.float32:
        padded = x if len(x) >= FEWEST else torch.nn.functional.pad(x, (0, 0, 0, FEWEST - len(x)))
        return (padded @ weight.float().T)[: len(x)]
    if x.device.type == "cpu":
        return x.float() @ weight.float().T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def plain_product(
    rows: Forms, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, multiply: Multiply
) -> None:
    """out = rows · weightᵀ (+ bias) (+ residual); x is float16 times a number for each row, two bfloat16, or float32,
    as the matrix is."""
    if weight.dtype == torch.float16:
        x, scale = rows.scaled()
        finish(multiply(x, weight), scale, out, bias, residual, 0, len(weight))
    elif weight.dtype == torch.bfloat16:
        high, low = torch.split(multiply(in_two(rows.floats()), weight), len(out))
        added(torch.add(high, low, out=out), bias, residual)
    else:
        added(out.copy_(multiply(rows.floats(), weight)), bias, residual)


def in_two(x: Tensor) -> Tensor:
    """float32 rows as bfloat16, and below them what those lack: sixteen bits of each value, and its whole range."""
    parts = torch.empty(2 * len(x), x.shape[1], dtype=torch.bfloat16, device=x.device)
    high, low = torch.split(parts, len(x))
    torch.sub(x, high.copy_(x), out=low)
    return parts


def added(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out (+ bias) (+ residual), in place."""
    for other in (bias, residual):
        if other is not None:
            out += other


def finish(
    product: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, first: int, last: int
) -> None:
    """out[:, first:last] = scale · product (+ bias) (+ residual)."""
    target = out[:, first:last]
    if residual is None:
        torch.mul(product, scale[:, None], out=target)
    else:
        torch.addcmul(residual[:, first:last], product, scale[:, None], out=target)
    if bias is not None:
        target += bias[first:last]
