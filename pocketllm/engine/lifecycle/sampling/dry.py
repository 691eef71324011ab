"""DRY: a penalty on tokens that would continue a repetition, growing with its length; llama.cpp's semantics.

Where the last n tokens have stood in the text before, the token that followed them there loses
`dry_multiplier · dry_base^(n - dry_allowed_length)`, for the longest such n, if n ≥ `dry_allowed_length`. A repetition
does not reach back over a sequence breaker (a text that the tokens complete), and tokens that hold a breaker are never
penalized. Prompt and answer both count, as far as `dry_penalty_last_n` looks back. It comes after bias and penalties,
before the temperature. (P. E. Weidmann, "DRY: a modern repetition penalty", 2024.)
"""

from collections.abc import Sequence
from math import log

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.drawing import Edit
from pocketllm.engine.lifecycle.sampling.bans import WordTokenizer
from pocketllm.engine.lifecycle.sampling.params import SamplingParams

Int64Array = npt.NDArray[np.int64]

LARGEST_LOG = 80.0
"""Of a power that float32 can hold, times the largest multiplier."""


class Dry:
    """One request's DRY penalty: all its tokens, and how long a repetition ends at each of them."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: WordTokenizer) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._breakers = [text.encode() for text in params.dry_sequence_breakers]
        self._longest = max(map(len, self._breakers), default=0)
        self._tail = b""
        self._window = params.dry_penalty_last_n if params.dry_penalty_last_n >= 0 else None
        ids = list(prompt_token_ids)
        if self._window is not None:
            ids = ids[len(ids) - min(self._window, len(ids)) :]
        self._tokens: Int64Array = np.array(ids, np.int64)
        self._matches = self._prompt_matches()

    @staticmethod
    def is_asked_for(params: SamplingParams) -> bool:
        """Whether it would change a logit."""
        return params.dry_multiplier > 0 and params.dry_penalty_last_n != 0

    def edits(self) -> list[Edit]:
        """What is to be subtracted now."""
        params, size = self._params, len(self._tokens)
        start = 0 if self._window is None else max(0, size - self._window)
        matches = np.minimum(self._matches[start : size - 1], np.arange(1, size - start))
        places = np.flatnonzero(matches >= params.dry_allowed_length)
        longest: dict[int, int] = {}
        for token_id, length in zip(self._tokens[start + 1 + places].tolist(), matches[places].tolist(), strict=True):
            longest[token_id] = max(length, longest.get(token_id, 0))
        most = LARGEST_LOG / log(params.dry_base) if params.dry_base > 1.000001 else float("inf")
        penalties = {
            token_id: params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, most)
            for token_id, length in longest.items()
            if not self._is_breaker(token_id)
        }
        ids = np.fromiter(penalties.keys(), np.int64, len(penalties))
        return [Edit(ids, -np.fromiter(penalties.values(), np.float32, len(penalties)))] if penalties else []

    def append(self, token_id: int) -> None:
        """The text has one more token."""
        matches = np.zeros(len(self._tokens) + 1, np.int64)
        if not self._breaks(token_id):
            longer = np.concatenate(([0], self._matches[:-1])) + 1 if len(self._matches) else self._matches
            matches[:-1] = np.where(self._tokens == token_id, longer, 0)
        self._tokens = np.append(self._tokens, token_id)
        self._matches = matches

    def _prompt_matches(self) -> Int64Array:
        """[tokens] for each place the length of the longest text that ends both there and at the last token."""
        tokens = self._tokens
        matches = np.zeros(len(tokens), np.int64)
        reach = self._num_since_breaker()
        alive = np.arange(len(tokens) - 1)
        for length in range(min(reach, len(tokens) - 1)):
            alive = alive[alive >= length]
            alive = alive[tokens[alive - length] == tokens[len(tokens) - 1 - length]]
            if not len(alive):
                break
            matches[alive] = length + 1
        return matches

    def _num_since_breaker(self) -> int:
        """Tokens of the prompt after the last breaker; the bytes that a later one may continue are kept."""
        count = 0
        for token_id in self._tokens.tolist():
            count = 0 if self._breaks(token_id) else count + 1
        return count

    def _breaks(self, token_id: int) -> bool:
        """Whether a breaker ends in this token, which is the next of the text."""
        data = self._bytes(token_id)
        text = self._tail + data
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else b""
        before = len(text) - len(data)
        return any(text.find(breaker, max(0, before - len(breaker) + 1)) >= 0 for breaker in self._breakers)

    def _is_breaker(self, token_id: int) -> bool:
        data = self._bytes(token_id)
        return any(breaker in data for breaker in self._breakers)

    def _bytes(self, token_id: int) -> bytes:
        if token_id >= self._tokenizer.vocab_size or self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)
