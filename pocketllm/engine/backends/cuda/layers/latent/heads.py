"""Each head of rows through a matrix of its own: few rows from weights as they lie, many on the tensor cores."""

from functools import cache

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.several import AT_ONCE
from pocketllm.engine.backends.cuda.layers.latent.kernels.heads import heads_product_kernel
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Plain
from pocketllm.engine.backends.cuda.mixtures.groups import TO_FEW, TO_MANY, Groups, gather, room_for
from pocketllm.engine.backends.cuda.mixtures.layer import product
from pocketllm.engine.backends.cuda.steps.graphs import TOKENS

AT_A_TIME = 16
"""Values of a head that one program computes of plain weights."""


def project_heads(x: Tensor, weight: ExpertMatrices, are_few: bool) -> Tensor:
    """[tokens, heads · cols] → [tokens, heads · rows]; weight: a matrix of each head."""
    tokens, heads = len(x), weight.experts
    if isinstance(weight.held, Plain):
        return few_plain(x, weight, weight.held) if are_few else many_plain(x, weight, weight.held)
    # a token is a row of each head, which is its "expert"
    # a captured step reads them where they are for ever; a larger one is never captured, and may be of any size
    make = of_heads if tokens <= TOKENS[-1] else of_heads.__wrapped__
    groups = make(tokens, heads, not are_few, x.device)
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


def many_plain(x: Tensor, weight: ExpertMatrices, plain: Plain) -> Tensor:
    """float32 throughout, by a library."""
    by_head = x.reshape(len(x), weight.experts, weight.cols).transpose(0, 1)
    matrices = plain.values.view(weight.experts, weight.rows, weight.cols).float()
    return torch.bmm(by_head, matrices.transpose(1, 2)).transpose(0, 1).reshape(len(x), -1)


@cache
def of_heads(tokens: int, heads: int, are_many: bool, device: torch.device) -> Groups:
    """Pairs of tokens and heads by head: what routes would be if every token used every expert. Shapes tell them, so
    they are made once."""
    each = room_for(tokens * heads, heads) if are_many else AT_ONCE
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
