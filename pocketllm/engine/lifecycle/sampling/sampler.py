"""Draws the next token of one row from that request's own random stream, or says how a device is to; numpy, no global
state.

A row's token depends on its logits, its parameters, its seed and the tokens before it, and on nothing else: not on its
neighbors in the batch, and not on having been preempted and recomputed.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.drawing import FORBIDDEN, Draw, Drawn, Edit
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

    def edits(self) -> list[Edit]:
        """The changes for the next token, one after another."""

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
        self._only = next((one.allowed for one in self._adjustments if isinstance(one, Bans)), None)
        self._mirostat = Mirostat(params) if params.mirostat else None
        # numpy takes no negative seed: a signed one is read as its 64 bits
        self._random = np.random.Generator(np.random.PCG64(seed % 2**64))

    def choose(self, logits: npt.NDArray[np.float32]) -> tuple[int, TokenLogprobs | None]:
        """The next token and, when asked for, its log-probabilities. logits: [vocab].

        Raises FloatingPointError when the logits name no distribution (NaN or +inf among them, or all -inf), and
        ConstraintError when the constraint leaves no token.
        """
        adjusted, allowed, edits = logits, self._allowed(), self._edits()
        if allowed is not None:
            adjusted = only(adjusted, allowed)
        elif edits:
            adjusted = adjusted.copy()
        for edit in edits:
            edit.apply(adjusted)
        token_id = int(np.argmax(adjusted))  # the first NaN, if there is one; else the lowest id of the largest
        if not np.isfinite(adjusted[token_id]):
            raise self._refusal(is_model_sound=bool(np.isfinite(logits.max())))
        if not self.params.is_greedy:
            token_id = self._draw(adjusted)
        count = self.params.logprobs
        return token_id, None if count is None else token_logprobs(logits, token_id, count)

    def accept(self, token_id: int) -> None:
        """The answer has one more token. Raises ConstraintError where the constraint cannot go on from it."""
        for adjustment in self._adjustments:
            adjustment.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    @property
    def is_drawable(self) -> bool:
        """Whether `draw` can say how the next token is drawn: the distribution itself, top-k, top-p and min-p."""
        params = self.params
        is_more = params.typical_p < 1.0 or params.xtc_probability > 0 or self._mirostat is not None
        return params.is_greedy or not is_more

    def draw(self, row: int) -> Draw:
        """What `choose` does with that row of logits, for a device to do; raises what it does before it looks at them.

        The random number is the one that `choose` would use; what a device sums in another order, or rounds otherwise,
        can make another token of it only where the number lies within that rounding of an edge between two tokens.
        """
        params, allowed, edits = self.params, self._allowed(), tuple(self._edits())
        if params.is_greedy:
            return Draw(row, allowed=allowed, edits=edits, num_logprobs=params.logprobs)
        return Draw(
            row,
            allowed=allowed,
            edits=edits,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            share=self._random.random(),
            num_logprobs=params.logprobs,
        )

    def drawn(self, result: Drawn) -> tuple[int, TokenLogprobs | None]:
        """What a device made of `draw`; raises what `choose` would have raised."""
        if result.token_id < 0:
            raise self._refusal(is_model_sound=result.token_id == FORBIDDEN)
        if self.params.logprobs is None:
            return result.token_id, None
        return result.token_id, TokenLogprobs(result.logprob, result.top_ids, result.top_logprobs)

    def _allowed(self) -> npt.NDArray[np.bool_] | None:
        if self.matcher is None:
            return self._only
        allowed = self.matcher.allowed()
        if self._only is None:
            return allowed
        shorter = min(len(allowed), len(self._only))
        return allowed[:shorter] & self._only[:shorter]

    def _edits(self) -> list[Edit]:
        return [edit for adjustment in self._adjustments for edit in adjustment.edits()]

    def _refusal(self, is_model_sound: bool) -> Exception:
        if self.matcher is not None and is_model_sound:
            return ConstraintError("the grammar allows only tokens that the request's other fields ban")
        return FloatingPointError("the model gave logits that are not finite")

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


def only(logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """The logits with -inf for what is not allowed, as a new row."""
    some = allowed[: len(logits)]
    masked = np.full_like(logits, -np.inf)
    np.copyto(masked[: len(some)], logits[: len(some)], where=some)
    return masked


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
