"""Draws the next token of one row from that request's own random stream; numpy, no global state.

A row's token depends on its logits, its parameters, its seed and the tokens before it, and on nothing else: not on its
neighbors in the batch, and not on having been preempted and recomputed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.logits_processors import candidates
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs, token_logprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.penalties import Penalties

STRIDE = 256
"""Weights that are summed before a place among them is looked for."""


class Sampler:
    """One request's sampling: its parameters, its random stream and what it has drawn, kept for the request's life."""

    def __init__(self, params: SamplingParams, seed: int, prompt_token_ids: Sequence[int] = ()) -> None:
        self.params = params
        self._penalties = Penalties(params, prompt_token_ids) if Penalties.are_asked_for(params) else None
        # numpy takes no negative seed: a signed one is read as its 64 bits
        self._random = np.random.Generator(np.random.PCG64(seed % 2**64))

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, TokenLogprobs | None]:
        """The next token and, when asked for, its log-probabilities. logits: [vocab].

        Raises FloatingPointError when the logits name no distribution (NaN or +inf among them, or all -inf).
        """
        adjusted = logits if self._penalties is None else self._penalties.apply(logits)
        token_id = int(np.argmax(adjusted))  # the first NaN, if there is one; else the lowest id of the largest
        if not np.isfinite(adjusted[token_id]):
            raise FloatingPointError("the model gave logits that are not finite")
        if not self.params.is_greedy:
            token_id = self._draw(adjusted)
        if self._penalties is not None:
            self._penalties.append(token_id)
        count = self.params.logprobs
        return token_id, None if count is None else token_logprobs(logits, token_id, count)

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        ids, weights = candidates(logits, self.params)
        # exactly one number of the stream for one token, whatever is kept
        place = place_of(weights, self._random.random())
        return place if ids is None else int(ids[place])


def place_of(weights: npt.NDArray[np.float32], share: float) -> int:
    """Inverse of the cumulative distribution: the first place up to which more than `share` of all weight lies.

    0 ≤ share < 1; a weight of 0 is never drawn.
    """
    # first among sums of strides, then inside one: a running sum over a whole vocabulary costs more than all the rest
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), STRIDE)), dtype=np.float64)
    target = share * sums[-1]  # less than the sum, for a share below 1 is at least half a last bit below
    stride = int(np.searchsorted(sums, target, side="right"))
    start = stride * STRIDE
    some = weights[start : start + STRIDE]
    rest = target - (sums[stride - 1] if stride else 0.0)
    place = int(np.searchsorted(np.cumsum(some, dtype=np.float64), rest, side="right"))
    return start + min(place, int(np.flatnonzero(some)[-1]))  # the two sums may differ in their last bits
