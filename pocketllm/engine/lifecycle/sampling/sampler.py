"""Draws the next token of one row from that request's own random stream; numpy, no global state.

A row's token depends on its logits, its parameters, its seed and the tokens before it, and on nothing else: not on its
neighbors in the batch, and not on having been preempted and recomputed.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.bans import Bans, WordTokenizer
from pocketllm.engine.lifecycle.sampling.dry import Dry
from pocketllm.engine.lifecycle.sampling.logits_processors import candidates, relative_weights, without_top_choices
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs, token_logprobs
from pocketllm.engine.lifecycle.sampling.mirostat import Mirostat
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.penalties import Penalties
from pocketllm.engine.structured.matcher import Matcher
from pocketllm.errors import ConstraintError

STRIDE = 256
"""Weights that are summed before a place among them is looked for."""


class Adjustment(Protocol):
    """Changes one request's logits before they are filtered, knowing the answer so far."""

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Change a row in place."""

    def append(self, token_id: int) -> None:
        """The answer has one more token."""


def adjustments(
    params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: WordTokenizer | None
) -> list[Adjustment]:
    """What a request asks for, in the order in which it acts. Raises RequestError for bans that leave no token."""
    found: list[Adjustment] = []
    if Bans.are_asked_for(params):
        assert tokenizer is not None, "bans are made of tokens"
        found.append(Bans(params, tokenizer))
    if Penalties.are_asked_for(params):
        found.append(Penalties(params, prompt_token_ids))
    if Dry.is_asked_for(params):
        assert tokenizer is not None, "sequence breakers are texts"
        found.append(Dry(params, prompt_token_ids, tokenizer))
    return found


class Sampler:
    """One request's sampling: its parameters, its random stream and what it has drawn, kept for the request's life.

    tokenizer: what `min_tokens`, `bad_words` and DRY need, nothing else; matcher: of `params.constraint`, if there is
    one. Raises RequestError as `adjustments` does.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int] = (),
        tokenizer: WordTokenizer | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self._adjustments = adjustments(params, prompt_token_ids, tokenizer)
        self._mirostat = Mirostat(params) if params.mirostat else None
        # numpy takes no negative seed: a signed one is read as its 64 bits
        self._random = np.random.Generator(np.random.PCG64(seed % 2**64))

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, TokenLogprobs | None]:
        """The next token and, when asked for, its log-probabilities. logits: [vocab].

        Raises FloatingPointError when the logits name no distribution (NaN or +inf among them, or all -inf), and
        ConstraintError when the constraint leaves no token.
        """
        adjusted = logits
        if self._adjustments:
            adjusted = logits.copy()
            for adjustment in self._adjustments:
                adjustment.apply(adjusted)
        if self.matcher is not None:
            adjusted = self.matcher.apply(adjusted)
        token_id = int(np.argmax(adjusted))  # the first NaN, if there is one; else the lowest id of the largest
        if not np.isfinite(adjusted[token_id]):
            if self.matcher is not None and np.isfinite(logits.max()):
                raise ConstraintError("the grammar allows only tokens that the request's other fields ban")
            raise FloatingPointError("the model gave logits that are not finite")
        if not self.params.is_greedy:
            token_id = self._draw(adjusted)
        for adjustment in self._adjustments:
            adjustment.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        count = self.params.logprobs
        return token_id, None if count is None else token_logprobs(logits, token_id, count)

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        if self._mirostat is not None:
            return self._draw_with(self._mirostat, logits)
        ids, weights = candidates(logits, self.params)
        # one number of the stream for one token, whatever is kept, and one before it where XTC may act
        if self.params.xtc_probability > 0 and self._random.random() < self.params.xtc_probability:
            kept = without_top_choices(weights, self.params.xtc_threshold)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        place = place_of(weights, self._random.random())
        return place if ids is None else int(ids[place])

    def _draw_with(self, mirostat: Mirostat, logits: npt.NDArray[np.float32]) -> int:
        weights = relative_weights(logits, float(logits.max()), self.params.temperature)
        kept = mirostat.keep(weights)
        some = weights[kept]
        place = place_of(some, self._random.random())
        mirostat.drawn(float(some[place]), float(some.sum(dtype=np.float64)))
        return int(kept[place])


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
