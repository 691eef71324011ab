"""A mixture of experts in plain torch: routed in float32, one expert at a time, summed in the order of the ranks."""

import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.ops import Gating, Routing
from pocketllm.engine.backends.reference.rows import pad_rows


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their weights: [tokens, num_used] each. logits: [tokens, experts]."""
    match routing.gating:
        case Gating.SOFTMAX:
            powers = (logits - logits.amax(-1, keepdim=True)).exp_()
            scores = powers / powers.sum(-1, keepdim=True)
        case Gating.SIGMOID:
            scores = 1 / logits.neg().exp_().add_(1)
    ranked = scores if routing.bias is None else scores + routing.bias
    # a stable sort: topk promises nothing about equal scores
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : routing.num_used]
    weights = scores.gather(-1, chosen)
    if routing.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * routing.scale


def expert_outputs(x: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What each of a token's experts makes of it: [tokens, num_used, out]. gate, up, down: [experts, out, in]."""
    outputs = x.new_empty(*chosen.shape, down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        rows = pad_rows(x[tokens])
        opened = functional.linear(rows, gate[expert])
        # spelled out as in `silu_mul`
        gated = pad_rows(opened / opened.neg().exp_().add_(1) * functional.linear(rows, up[expert]))
        outputs[tokens, ranks] = functional.linear(gated, down[expert])[: len(tokens)]
    return outputs


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · output, rank after rank: [tokens, out]."""
    total = outputs[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += outputs[:, rank] * weights[:, rank : rank + 1]
    return total
