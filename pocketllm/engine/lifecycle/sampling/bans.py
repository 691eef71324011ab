"""Tokens that a request may not draw now: `min_tokens`, `allowed_token_ids` and `bad_words`, in vLLM's semantics.

A ban sets the logit to -inf, before bias and penalties, so that nothing brings the token back.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.drawing import Edit
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.errors import RequestError


class WordTokenizer(Protocol):
    """The part of a tokenizer that turns a request's texts into tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Bans:
    """One request's bans, with what they must know of its answer.

    Raises RequestError where they leave nothing to draw.
    """

    def __init__(self, params: SamplingParams, tokenizer: WordTokenizer) -> None:
        self._min_tokens = params.min_tokens
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(tokenizer.eos_token_ids))
        self._end_ids = np.array(sorted(ends), np.int64)
        self._allowed_ids = sorted(set(params.allowed_token_ids))
        self._words = bad_word_ids(params.bad_words, tokenizer)
        self._answer: list[int] = []
        self._check(ends, tokenizer.vocab_size)
        self.allowed: npt.NDArray[np.bool_] | None = None
        """[vocab] the only tokens that may be drawn; None: all."""
        if self._allowed_ids:
            self.allowed = np.zeros(tokenizer.vocab_size, np.bool_)
            self.allowed[self._allowed_ids] = True

    @staticmethod
    def are_asked_for(params: SamplingParams) -> bool:
        """Whether any of them would ban a token."""
        return bool(params.min_tokens or params.allowed_token_ids or params.bad_words)

    def _check(self, ends: set[int], vocab_size: int) -> None:
        if self._allowed_ids and not 0 <= self._allowed_ids[0] <= self._allowed_ids[-1] < vocab_size:
            raise RequestError(
                f"allowed_token_ids has an id outside the vocabulary (0 to {vocab_size - 1})", param="allowed_token_ids"
            )
        if self._allowed_ids and self._words:
            raise RequestError("allowed_token_ids and bad_words cannot be combined", param="bad_words")
        left = set(self._allowed_ids) or set(range(vocab_size))
        left -= {word[-1] for word in self._words}
        if not left - (ends if self._min_tokens else set()):
            raise RequestError("these bans leave no token to draw", param="allowed_token_ids")

    def edits(self) -> list[Edit]:
        """What must not be drawn now, among the allowed tokens."""
        banned = {last for *before, last in self._words if not before or self._answer[-len(before) :] == before}
        ids = np.array(sorted(banned), np.int64)
        if len(self._answer) < self._min_tokens:
            ids = np.union1d(ids, self._end_ids)
        return [Edit(ids, np.full(len(ids), -np.inf, np.float32))] if len(ids) else []

    def append(self, token_id: int) -> None:
        """The answer has one more token."""
        self._answer.append(token_id)


def bad_word_ids(words: Sequence[str], tokenizer: WordTokenizer) -> list[list[int]]:
    """The token sequences of words: each as it stands, and after a space where that makes other tokens as many.

    As vLLM does it; other ways to spell a word in tokens stay possible.
    """
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(" ") or word, add_special=False)
        spaced = tokenizer.encode(" " + word.lstrip(" "), add_special=False)
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
