"""Draws tokens where their logits are, by kernels; what top-k and top-p leave torch sorts for.

Everything here runs on the CPU as well, the kernels in Triton's interpreter.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.drawing import FORBIDDEN, NOT_FINITE, Draw
from pocketllm.engine.backends.cuda.steps.drawing.kernels.draw import likeliest_kernel, maxima_kernel
from pocketllm.engine.backends.cuda.steps.drawing.kernels.sample import (
    edges_kernel,
    sorted_sums_kernel,
    sums_kernel,
    token_kernel,
)

CHUNK = 4096
"""Logits that one program looks through for the largest."""
WEIGHED = 1024
"""Logits that one program weighs."""
FEWEST = 128
"""Chunks that a row's program has room for at least: one for each of its threads."""
ROWS_AT_ONCE = 32
"""Rows that are sorted together: of 262,144 tokens they take half a GiB while they are."""
PARAMS = ("temperature", "top_k", "top_p", "min_p", "share")
"""Columns of what `sampled` is told of each row, in float64; as in `Draw`, and in the kernels' order."""


def sorts(draws: Sequence[Draw]) -> bool:
    """Whether any draw has a filter that needs logits in order."""
    return any(draw.temperature > 0 and (draw.top_k > 0 or draw.top_p < 1) for draw in draws)


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


def sampled(logits: Tensor, token_ids: Tensor, largest: Tensor, params: Tensor, has_sorts: bool) -> None:
    """Write the tokens of rows with a temperature, drawn from what temperature and filters leave.

    As `likeliest` left token_ids and largest, both as long as logits or longer, as is params: float64 [rows, PARAMS].
    has_sorts: whether any row has a top-k or a top-p. What is kept, and how a share becomes a token, is what
    `lifecycle.sampling.logits_processors` does, and so is the order: temperature, top-k, top-p, min-p, and the first
    token by id.
    """
    at_once = ROWS_AT_ONCE if has_sorts else len(logits)
    for first in range(0, len(logits), at_once):
        some = slice(first, first + at_once)
        rows = logits[some], largest[some], token_ids[some], params[some]
        draw_tokens(*rows, edges_of(*rows) if has_sorts else None)


def edges_of(logits: Tensor, largest: Tensor, token_ids: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Where top-k and top-p end: of each row the least logit and the least weight, and how many of that weight stay."""
    descending = torch.sort(logits, dim=1, descending=True).values
    rows, vocab, chunks = chunked(descending)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    sorted_sums_kernel[(rows, chunks)](
        descending, largest, token_ids, params, sums, vocab, descending.stride(0), CHUNK=WEIGHED, num_warps=4
    )
    edges = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    num_ties = torch.empty(rows, dtype=torch.int32, device=logits.device)
    edges_kernel[(rows,)](
        descending,
        largest,
        token_ids,
        params,
        sums,
        edges,
        num_ties,
        vocab,
        descending.stride(0),
        chunks,
        CHUNK=WEIGHED,
        BLOCK=max(triton.next_power_of_2(chunks), FEWEST),
        num_warps=4,
    )
    return edges, num_ties


def draw_tokens(
    logits: Tensor, largest: Tensor, token_ids: Tensor, params: Tensor, edges: tuple[Tensor, Tensor] | None
) -> None:
    """Tokens by their shares of what edges and min-p leave."""
    rows, vocab, chunks = chunked(logits)
    sums = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    # without edges nothing is read there
    ties = sums if edges is None else torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    least, num_ties = (largest, token_ids) if edges is None else edges
    sums_kernel[(rows, chunks)](
        logits,
        largest,
        token_ids,
        params,
        least,
        sums,
        ties,
        vocab,
        logits.stride(0),
        HAS_EDGES=edges is not None,
        CHUNK=WEIGHED,
        num_warps=4,
    )
    token_kernel[(rows,)](
        logits,
        largest,
        token_ids,
        params,
        least,
        num_ties,
        sums,
        ties,
        vocab,
        logits.stride(0),
        chunks,
        HAS_EDGES=edges is not None,
        CHUNK=WEIGHED,
        BLOCK=max(triton.next_power_of_2(chunks), FEWEST),
        num_warps=4,
    )


def chunked(logits: Tensor) -> tuple[int, int, int]:
    """Rows, tokens, and chunks that are weighed in each row."""
    rows, vocab = logits.shape
    return rows, vocab, triton.cdiv(vocab, WEIGHED)


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
