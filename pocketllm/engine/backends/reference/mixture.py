"""A mixture of experts in plain torch: routed in float32, one expert at a time, summed in the order of the ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, Routing
from pocketllm.engine.backends.reference.recurrent import softplus
from pocketllm.engine.backends.reference.rows import pad_rows, product


def route(logits: Tensor, routing: Routing, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts, best first, and their weights: [tokens, num_used] each. logits: [tokens, experts].

    routes: the experts, where scores do not choose them.
    """
    match routing.gating:
        case Gating.SOFTMAX:
            powers = (logits - logits.amax(-1, keepdim=True)).exp_()
            scores = powers / powers.sum(-1, keepdim=True)
        case Gating.SIGMOID:
            scores = 1 / logits.neg().exp_().add_(1)
        case Gating.SQRT_SOFTPLUS:
            scores = softplus(logits).sqrt_()
    chosen = best_experts(scores, routing) if routes is None else routes
    weights = scores.gather(-1, chosen)
    if routing.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * routing.scale


def best_experts(scores: Tensor, routing: Routing) -> Tensor:
    """Those of the highest score + bias, best first: [tokens, num_used]."""
    ranked = scores if routing.bias is None else scores + routing.bias
    if routing.num_groups > 1:
        ranked = in_best_groups(ranked, routing)
    # a stable sort: topk promises nothing about equal scores
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : routing.num_used]


def in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """-inf for experts outside a token's best groups. ranked: [tokens, experts]."""
    groups = ranked.view(len(ranked), routing.num_groups, -1)
    best = groups.sort(-1, descending=True).values[..., : routing.best_of_group]
    strength = best[..., 0].clone()
    for rank in range(1, best.shape[-1]):
        strength += best[..., rank]
    used = torch.sort(strength, dim=-1, descending=True, stable=True).indices[:, : routing.num_groups_used]
    left_out = torch.ones_like(strength, dtype=torch.bool).scatter_(-1, used, False)
    return groups.masked_fill(left_out[..., None], -torch.inf).view(ranked.shape)


def expert_outputs(x: Tensor, chosen: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What each of a token's experts makes of it: [tokens, num_used, out]. gate, up, down: [experts, out, in]."""
    outputs = x.new_empty(*chosen.shape, down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        rows = pad_rows(x[tokens])
        opened = product(rows, gate[expert])
        # spelled out as in `silu_mul`
        gated = pad_rows(opened / opened.neg().exp_().add_(1) * product(rows, up[expert]))
        outputs[tokens, ranks] = product(gated, down[expert])[: len(tokens)]
    return outputs


def gelu_outputs(x: Tensor, chosen: Tensor, experts: Experts, gelu_mul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`expert_outputs` of experts whose gate is a gelu."""
    outputs = x.new_empty(*chosen.shape, experts.down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        rows = pad_rows(x[tokens])
        opened = gelu_mul(product(rows, experts.gate[expert]), product(rows, experts.up[expert]))
        outputs[tokens, ranks] = product(pad_rows(opened), experts.down[expert])[: len(tokens)]
    return outputs


def bounded_outputs(x: Tensor, chosen: Tensor, bounded: BoundedExperts) -> Tensor:
    """`expert_outputs` of experts with biases and a bounded gate."""
    gate, up, down = bounded.experts.gate, bounded.experts.up, bounded.experts.down
    outputs = x.new_empty(*chosen.shape, down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        rows = pad_rows(x[tokens])
        opened = (product(rows, gate[expert]) + bounded.gate_bias[expert]).clamp_(max=bounded.limit)
        value = (product(rows, up[expert]) + bounded.up_bias[expert]).clamp_(-bounded.limit, bounded.limit)
        gated = opened / (opened * -bounded.slope).exp_().add_(1) * (value + 1)
        outputs[tokens, ranks] = product(gated, down[expert])[: len(tokens)] + bounded.down_bias[expert]
    return outputs


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · output, rank after rank: [tokens, out]."""
    total = outputs[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += outputs[:, rank] * weights[:, rank : rank + 1]
    return total
