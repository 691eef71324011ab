"""Draws the next token of one row from that request's own random stream; numpy, no global state.

A row's token depends on its logits, its parameters, its seed and how many tokens it has drawn, and on nothing else:
not on its neighbors in the batch, and not on having been preempted and recomputed.
"""

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.logits_processors import candidates
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs, token_logprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams


class Sampler:
    """One request's sampling: its parameters and its random stream, kept for the request's life."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        # numpy takes no negative seed: a signed one is read as its 64 bits
        self._random = np.random.Generator(np.random.PCG64(seed % 2**64))

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, TokenLogprobs | None]:
        """The next token and, when asked for, its log-probabilities. logits: [vocab].

        Raises FloatingPointError when the logits name no distribution (NaN or +inf among them, or all -inf).
        """
        token_id = int(np.argmax(logits))  # the first NaN, if there is one; else the lowest id of the largest
        if not np.isfinite(logits[token_id]):
            raise FloatingPointError("the model gave logits that are not finite")
        if not self.params.is_greedy:
            token_id = self._draw(logits)
        count = self.params.logprobs
        return token_id, None if count is None else token_logprobs(logits, token_id, count)

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        ids, probabilities = candidates(logits, self.params)
        # inverse of the cumulative distribution: exactly one number of the stream for one token, whatever is kept
        cumulative = np.cumsum(probabilities)
        place = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])
