"""What a request may learn of the distribution its token was drawn from; numpy, one row at a time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one output position."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Log-softmax (in float64) of the unmodified logits at the chosen token and at the `count` likeliest ones.

    The likeliest come first, the lower id first among equals.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top: npt.NDArray[np.int64] = np.empty(0, np.int64)
    if count:
        count = min(count, len(values))
        smallest = np.partition(values, len(values) - count)[len(values) - count]
        places = np.flatnonzero(values >= smallest)
        top = places[np.argsort(-values[places], kind="stable")][:count]
    return TokenLogprobs(
        chosen=float(values[token_id]),
        top_ids=tuple(int(place) for place in top),
        top_logprobs=tuple(float(values[place]) for place in top),
    )
