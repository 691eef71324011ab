"""Each head of rows through a matrix of its own: few rows from weights as they lie, many on the tensor cores."""

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.fixed import fixed_product
from pocketllm.engine.backends.cuda.kernels.several import AT_ONCE
from pocketllm.engine.backends.cuda.layers.latent.kernels.heads import heads_product_kernel
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Plain
from pocketllm.engine.backends.cuda.mixtures.groups import (
    INVARIANT_ROOM,
    TO_FEW,
    TO_MANY,
    Groups,
    gather,
    room_for,
)
from pocketllm.engine.backends.cuda.mixtures.layer import product
from pocketllm.engine.backends.cuda.steps.graphs import TOKENS

AT_A_TIME = 16
"""Values of a head that one program computes of plain weights."""


def project_heads(x: Tensor, weight: ExpertMatrices, are_few: bool, is_invariant: bool = False) -> Tensor:
    """[tokens, heads · cols] → [tokens, heads · rows]; weight: a matrix of each head.

    is_invariant: whether no number of tokens may decide how sums are made.
    """
    tokens, heads = len(x), weight.experts
    if isinstance(weight.held, Plain):
        if are_few:
            return few_plain(x, weight, weight.held)
        return many_plain(x, weight, weight.held, product_by_product if is_invariant else library_products)
    # a token is a row of each head, which is its "expert"
    # a captured step reads them where they are for ever; a larger one is never captured, and may be of any size
    make = of_heads if tokens <= TOKENS[-1] else of_heads.__wrapped__
    each = AT_ONCE if are_few else INVARIANT_ROOM if is_invariant else room_for(tokens * heads, heads)
    groups = make(tokens, heads, each, not are_few, x.device)
    own = x.reshape(tokens * heads, weight.cols)
    gathered = gather(own, own, groups, 1, TO_FEW if are_few else TO_MANY)
    return product(gathered, weight, groups, 1, None).view(tokens, heads * weight.rows)


def few_plain(x: Tensor, weight: ExpertMatrices, plain: Plain) -> Tensor:
    """float32 throughout; a row's sums do not depend on others."""
    y = torch.empty(len(x), weight.experts * weight.rows, dtype=torch.float32, device=x.device)
    heads_product_kernel[(-(-weight.rows // AT_A_TIME), weight.experts)](
        x, plain.values, y, x.stride(0), len(x), weight.experts, weight.rows,
        TILE=AT_A_TIME, WIDTH=weight.cols, LINE=triton.next_power_of_2(weight.cols), num_warps=4,
    )  # fmt: skip
    return y


def many_plain(x: Tensor, weight: ExpertMatrices, plain: Plain, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """float32 throughout."""
    by_head = x.reshape(len(x), weight.experts, weight.cols).transpose(0, 1)
    matrices = plain.values.view(weight.experts, weight.rows, weight.cols)
    return multiply(by_head, matrices).transpose(0, 1).reshape(len(x), -1)


def library_products(x: Tensor, matrices: Tensor) -> Tensor:
    """[heads, tokens, cols] · [heads, rows, cols]ᵀ."""
    return torch.bmm(x, matrices.float().transpose(1, 2))


def product_by_product(x: Tensor, matrices: Tensor) -> Tensor:
    """The same in tiles of one size."""
    return torch.stack([fixed_product(own, matrix) for own, matrix in zip(x, matrices, strict=True)])


@cache
def of_heads(tokens: int, heads: int, each: int, are_many: bool, device: torch.device) -> Groups:
    """Pairs of tokens and heads by head: what routes would be if every token used every expert. Shapes tell them, so
    they are made once. each: pairs in an item."""
    items = -(-tokens // each)
    token, head = torch.arange(tokens)[:, None], torch.arange(heads)[None, :]
    slots = (head * items * each + token).reshape(-1)
    pairs = torch.zeros(heads * items * each, dtype=torch.int64)
    pairs[slots] = torch.arange(tokens * heads)
    counts = (tokens - torch.arange(items) * each).clamp(max=each).repeat(heads)

    def kept(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(device)

    return Groups(
        chosen=kept(head.expand(tokens, heads)),
        weights=torch.ones(tokens, heads, device=device),
        slots=kept(slots),
        pairs=kept(pairs),
        item_experts=kept(torch.arange(heads).repeat_interleave(items)),
        item_counts=kept(counts),
        num_items=kept(torch.tensor([heads * items])),
        each=each,
        are_many=are_many,
    )
