"""Log-probabilities as OpenAI spells them: token texts readable, token bytes exact, offsets in characters."""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs
from pocketllm.engine.serving.settings import ServedTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True)
class Spelling:
    """One token for readers. `data` None: a control token, which leaves no bytes in the text."""

    text: str
    data: bytes | None


@dataclass(frozen=True)
class TokenReport:
    """One output position: the chosen token first, then the alternatives, each (token id, log-probability)."""

    token_id: int
    logprob: float | None
    """None: nothing came before this token, so that nothing is known of it."""
    top: tuple[tuple[int, float], ...]
    text_offset: int
    """Characters of the text that were complete before this token."""


class Speller:
    """Token ids to spellings, cached: the same alternatives come back at every position.

    Part of a character is written `\\xe2\\x82`, after `prefix` (`bytes:` in the completions API).
    """

    def __init__(self, tokenizer: ServedTokenizer, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._prefix = prefix
        self.strips_first_space = tokenizer.strips_first_space
        self.spell = lru_cache(maxsize=4096)(self._spell)

    def _spell(self, token_id: int) -> Spelling:
        if token_id >= self._tokenizer.vocab_size:
            return Spelling("", None)  # a row of the head that no token belongs to
        if self._tokenizer.is_special(token_id):
            return Spelling(self._tokenizer.token_text(token_id), None)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return Spelling(data.decode("utf-8"), data)
        except UnicodeDecodeError:
            return Spelling(self._prefix + "".join(f"\\x{byte:02x}" for byte in data), data)


class OffsetCounter:
    """Counts the characters that the tokens so far have completed.

    strips_space: the text begins with a prompt whose first space the tokenizer has put there itself.
    """

    def __init__(self, strips_space: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._count = 0
        self._strips_space = strips_space

    def advance(self, data: bytes | None) -> int:
        """Characters before this token; the token is then counted in."""
        before = self._count
        if data and self._strips_space:
            data, self._strips_space = data.removeprefix(b" "), False
        self._count += len(self._decoder.decode(data or b""))
        return before


def report(token_id: int, logprobs: TokenLogprobs | None, text_offset: int, num_top: int | None = None) -> TokenReport:
    """The engine's log-probabilities of one position as a report, with all alternatives or the first `num_top`."""
    if logprobs is None:
        return TokenReport(token_id, None, (), text_offset)
    pairs = zip(logprobs.top_ids[:num_top], logprobs.top_logprobs, strict=False)
    top = tuple((int(top_id), finite(value)) for top_id, value in pairs)
    return TokenReport(token_id, finite(logprobs.chosen), top, text_offset)


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    return max(float(value), LOWEST)


def chat_logprobs(reports: Iterable[TokenReport], speller: Speller, with_ids: bool) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; `with_ids` adds `token_id` to every entry."""
    content = []
    for item in reports:
        entry = chat_entry(item.token_id, item.logprob, speller, with_ids)
        entry["top_logprobs"] = [chat_entry(top_id, value, speller, with_ids) for top_id, value in item.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def chat_entry(token_id: int, logprob: float | None, speller: Speller, with_ids: bool) -> dict[str, Any]:
    """One token of a chat choice's `logprobs`."""
    spelling = speller.spell(token_id)
    data = None if spelling.data is None else list(spelling.data)
    entry: dict[str, Any] = {"token": spelling.text, "logprob": logprob, "bytes": data}
    return entry | {"token_id": token_id} if with_ids else entry


def completion_logprobs(reports: Iterable[TokenReport], speller: Speller, with_ids: bool) -> dict[str, Any]:
    """The `logprobs` object of a completions choice: parallel lists.

    The chosen token always is among the alternatives of its position, as in OpenAI's API, so there may be one more
    than asked for. `with_ids` adds `content`, the chat form, whose entries carry `token_id`: spellings may collide.
    """
    reports = list(reports)
    document: dict[str, Any] = {
        "tokens": [speller.spell(item.token_id).text for item in reports],
        "token_logprobs": [item.logprob for item in reports],
        "top_logprobs": [alternatives(item, speller) for item in reports],
        "text_offset": [item.text_offset for item in reports],
    }
    if with_ids:
        document["content"] = chat_logprobs(reports, speller, with_ids)["content"]
    return document


def alternatives(item: TokenReport, speller: Speller) -> dict[str, float] | None:
    """Spelling → log-probability, best first; of two tokens with one spelling the likelier stays."""
    if item.logprob is None:
        return None
    pairs = item.top if item.token_id in dict(item.top) else (*item.top, (item.token_id, item.logprob))
    found: dict[str, float] = {}
    for token_id, value in pairs:
        found.setdefault(speller.spell(token_id).text, value)
    return found


def prompt_reports(request: Request, counter: OffsetCounter, speller: Speller) -> list[TokenReport]:
    """A report of each prompt token, with as many alternatives as the answer's tokens have."""
    pairs = zip(request.prompt_token_ids, request.prompt_logprobs, strict=True)
    num_top = request.params.logprobs or 0
    return [
        report(token_id, logprobs, counter.advance(speller.spell(token_id).data), num_top)
        for token_id, logprobs in pairs
    ]


def prompt_logprobs(request: Request, count: int, speller: Speller) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, the first being null, its id and the `count` likeliest ids.

    Each id → {logprob, rank, decoded_token}; the likeliest come first, and the prompt's own token is always there.
    """
    found: list[dict[str, Any] | None] = []
    for token_id, logprobs in zip(request.prompt_token_ids, request.prompt_logprobs, strict=True):
        if logprobs is None:
            found.append(None)
            continue
        pairs = list(zip(logprobs.top_ids[:count], logprobs.top_logprobs, strict=False))
        ranked = {top_id: (value, rank) for rank, (top_id, value) in enumerate(pairs, 1)}
        ranked.setdefault(token_id, (logprobs.chosen, logprobs.rank))
        found.append(
            {
                str(one): {"logprob": finite(value), "rank": rank, "decoded_token": speller.spell(one).text}
                for one, (value, rank) in ranked.items()
            }
        )
    return found
