"""What a request may learn of the distribution its token was drawn from; numpy, one row at a time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.logits_processors import top_k


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one output position."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int = 0
    """Place of the token among all, 1 for the likeliest, equals sharing the best; 0: it was not asked for."""


def token_logprobs(
    logits: npt.NDArray[np.float32], token_id: int, count: int, with_rank: bool = False
) -> TokenLogprobs:
    """Log-softmax (in float64) of the unmodified logits at the chosen token and at the `count` likeliest ones.

    The likeliest come first, the lower id first among equals.
    """
    values = logits.astype(np.float64)
    largest = values.max()
    values -= largest
    log_total = largest + np.log(np.exp(values, out=values).sum())
    top: npt.NDArray[np.int64] = np.empty(0, np.int64)
    if count:
        places = top_k(logits, min(count, len(logits)))
        top = places[np.argsort(-logits[places], kind="stable")][:count]
    return TokenLogprobs(
        chosen=float(logits[token_id] - log_total),
        top_ids=tuple(top.tolist()),
        top_logprobs=tuple((logits[top] - log_total).tolist()),
        rank=1 + int(np.count_nonzero(logits > logits[token_id])) if with_rank else 0,
    )
