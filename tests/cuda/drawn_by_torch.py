"""What top-k, top-p, min-p and a share leave, by operations of torch on whole rows: what the kernels are held to."""

import torch
from torch import Tensor

UNITS = 2.0**44


def filtered(logits: Tensor, largest: Tensor, params: Tensor) -> Tensor:
    """Tokens: int64 [rows]. logits: [rows, vocab]; largest: [rows]; params: float64 [rows, 5], as the drawer's."""
    temperature, top_k, top_p, min_p, share = (column[:, None] for column in params.unbind(1))
    heat = torch.where(temperature > 0, temperature, 1.0).float()
    weights = nucleus(logits, weights_of(logits, largest, heat), largest, heat, top_k.long(), top_p)
    weights = torch.where(weights >= min_p.float(), weights, 0.0)
    running = amounts(weights).cumsum(1)
    total = running[:, -1:]
    target = torch.minimum((share * total.double()).long(), total - 1)
    return (running <= target).sum(1).clamp(max=logits.shape[1] - 1)


def nucleus(logits: Tensor, weights: Tensor, largest: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights, but 0 for what top-k and then top-p leave out; what ties at top-p's edge stays by the lowest ids."""
    descending = torch.sort(logits, dim=1, descending=True).values
    vocab = logits.shape[1]
    last = descending.gather(1, torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1)
    weights = torch.where(logits >= last, weights, 0.0)
    heaviest = torch.where(descending >= last, weights_of(descending, largest, heat), 0.0)
    running = amounts(heaviest).cumsum(1).double()
    count = (running < top_p * running[:, -1:]).sum(1, keepdim=True) + 1
    lightest = heaviest.gather(1, count - 1)
    num_ties = count - (heaviest > lightest).sum(1, keepdim=True)
    is_tie = weights == lightest
    is_kept = (weights > lightest) | (is_tie & (is_tie.cumsum(1) <= num_ties))
    return torch.where(is_kept, weights, 0.0)


def weights_of(logits: Tensor, largest: Tensor, heat: Tensor) -> Tensor:
    """exp((logits - largest) / heat), rounded once."""
    return ((logits - largest[:, None]) / heat).double().exp().float()


def amounts(weights: Tensor) -> Tensor:
    """Weights as whole numbers of units."""
    return (weights.double() * UNITS).long()
