"""What a request changes in its logits before they are filtered: bias and penalties.

Semantics and order are vLLM's. First `logit_bias` is added; then `repetition_penalty` (Keskar et al. 2019) divides
logits above 0 and multiplies the others, for every token of prompt and answer; then `frequency_penalty` times the count
in the answer, and `presence_penalty` for every token of the answer, are subtracted. They act on greedy requests too,
and reported log-probabilities are those of the logits before.
"""

from collections.abc import Sequence

import numpy as np

from pocketllm.engine.backends.api.drawing import Edit
from pocketllm.engine.lifecycle.sampling.params import SamplingParams


class Penalties:
    """One request's bias and penalties, with what they must know of its tokens."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self._bias = np.array([value for _, value in params.logit_bias], np.float32)
        self._seen_ids = np.unique(np.array(prompt_token_ids, np.int64))
        self._seen = set(self._seen_ids.tolist())
        self._answer_ids = np.empty(0, np.int64)
        self._answer_counts = np.empty(0, np.float32)
        self._places: dict[int, int] = {}

    @staticmethod
    def are_asked_for(params: SamplingParams) -> bool:
        """Whether any of them would change a logit."""
        has_penalty = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        return has_penalty or bool(params.logit_bias)

    def edits(self) -> list[Edit]:
        """What they change now, one after another."""
        params = self._params
        found = []
        if len(self._bias_ids):
            found.append(Edit(self._bias_ids, self._bias))
        if params.repetition_penalty != 1.0:
            factors = np.full(len(self._seen_ids), params.repetition_penalty, np.float32)
            found.append(Edit(self._seen_ids, factors, divides=True))
        fall = np.float32(params.frequency_penalty) * self._answer_counts + np.float32(params.presence_penalty)
        if fall.any():
            found.append(Edit(self._answer_ids, -fall))
        return found

    def append(self, token_id: int) -> None:
        """The answer has one more token."""
        if token_id not in self._seen:
            self._seen.add(token_id)
            self._seen_ids = np.append(self._seen_ids, token_id)
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._answer_ids):
            self._answer_ids = np.append(self._answer_ids, token_id)
            self._answer_counts = np.append(self._answer_counts, np.float32(0))
        self._answer_counts[place] += 1
