"""Draws tokens where their logits are: the likeliest by kernels, the rest of sampling by operations of torch.

Everything here runs on the CPU as well, the kernels in Triton's interpreter.
"""

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.drawing import FORBIDDEN, NOT_FINITE
from pocketllm.engine.backends.cuda.kernels.draw import likeliest_kernel, maxima_kernel

CHUNK = 4096
"""Logits that one program looks through for the largest."""
UNITS = 2.0**44
"""Weights are summed as whole multiples of 1 / UNITS, so that no order of summing changes a sum. The largest weight is
1, and 2^19 of them, more than any vocabulary has, still fit 64 bits."""


def likeliest(logits: Tensor, own: Tensor, token_ids: Tensor, largest: Tensor) -> None:
    """Write each row's likeliest token, or why there is none, and its logit.

    logits, own: [rows, vocab] as edited and as the model gave them; token_ids: int32 [rows]; largest: float32 [rows].
    """
    tops, places = maxima(logits)
    own_tops = tops if own is logits else maxima(own)[0]
    num_chunks = tops.shape[1]
    likeliest_kernel[(len(logits),)](
        tops,
        places,
        own_tops,
        token_ids,
        largest,
        num_chunks,
        NOT_FINITE=NOT_FINITE,
        FORBIDDEN=FORBIDDEN,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )


def maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each chunk of each row: [rows, chunks] the largest value, and its place."""
    rows, vocab = logits.shape
    tops = torch.empty(rows, triton.cdiv(vocab, CHUNK), dtype=torch.float32, device=logits.device)
    places = torch.empty(tops.shape, dtype=torch.int32, device=logits.device)
    maxima_kernel[tuple(tops.shape)](logits, tops, places, vocab, logits.stride(0), CHUNK=CHUNK, num_warps=8)
    return tops, places


ROWS_AT_ONCE = 32
"""Rows that are filtered together: of 262,144 tokens they take half a GiB while they are."""
PARAMS = ("temperature", "top_k", "top_p", "min_p", "share")
"""Columns of what `filtered` is told of each row, in float64; as in `Draw`."""


def filtered(logits: Tensor, largest: Tensor, params: Tensor, sorts: bool) -> Tensor:
    """Tokens drawn from what temperature and filters leave: int64 [rows].

    logits: [rows, vocab]; largest: [rows]; params: [rows, PARAMS]; sorts: whether any row has a top-k or a top-p. What
    is kept, and how a share becomes a token, is what `lifecycle.sampling.logits_processors` does, and so is the order:
    temperature, top-k, top-p, min-p, and the first token by id.
    """
    temperature, top_k, top_p, min_p, share = (column[:, None] for column in params.unbind(1))
    heat = torch.where(temperature > 0, temperature, 1.0).float()
    weights = weights_of(logits, largest, heat)
    if sorts:
        weights = nucleus(logits, weights, largest, heat, top_k.long(), top_p)
    weights = torch.where(weights >= min_p.float(), weights, 0.0)
    running = amounts(weights).cumsum(1)
    total = running[:, -1:]
    # less than the total, for a share is less than one
    target = torch.minimum((share * total.double()).long(), total - 1)
    return (running <= target).sum(1).clamp(max=logits.shape[1] - 1)


def nucleus(logits: Tensor, weights: Tensor, largest: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights, but 0 for what top-k and then top-p leave out; what ties at top-p's edge stays by the lowest ids."""
    descending = torch.sort(logits, dim=1, descending=True).values
    vocab = logits.shape[1]
    last = descending.gather(1, torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1)
    weights = torch.where(logits >= last, weights, 0.0)
    # of sorted logits the weights are sorted too
    heaviest = torch.where(descending >= last, weights_of(descending, largest, heat), 0.0)
    running = amounts(heaviest).cumsum(1).double()
    count = (running < top_p * running[:, -1:]).sum(1, keepdim=True) + 1
    lightest = heaviest.gather(1, count - 1)
    num_ties = count - (heaviest > lightest).sum(1, keepdim=True)
    is_tie = weights == lightest
    is_kept = (weights > lightest) | (is_tie & (is_tie.cumsum(1) <= num_ties))
    return torch.where(is_kept, weights, 0.0)


def weights_of(logits: Tensor, largest: Tensor, heat: Tensor) -> Tensor:
    """exp((logits - largest) / heat), rounded once: the same on every device."""
    return ((logits - largest[:, None]) / heat).double().exp().float()


def amounts(weights: Tensor) -> Tensor:
    """Weights as whole numbers of units."""
    return (weights.double() * UNITS).long()


def log_probabilities(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Natural log-probabilities of a token of each row, then of the `count` likeliest ones: [rows, 1 + count] float64.

    Beside them the ids of the likeliest, the lower one first among equals: [rows, count].
    """
    values = logits.double()
    largest = values.amax(1, keepdim=True)
    log_total = largest + (values - largest).exp().sum(1, keepdim=True).log()
    chosen = values.gather(1, token_ids.clamp(min=0).long()[:, None])
    descending = torch.sort(logits, dim=1, descending=True, stable=True)
    top = descending.values[:, :count].double()
    return torch.cat((chosen, top), 1) - log_total, descending.indices[:, :count]
