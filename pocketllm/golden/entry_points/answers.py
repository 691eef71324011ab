"""OpenAI-shaped answers, whole or streamed, as observations: ids, logprobs, cached tokens where they are shown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pocketllm.golden.compare import Observed

Entry = tuple[float, int | None, tuple[tuple[int, float], ...] | None]
"""One output token: its logprob, its id, and the likeliest (id, logprob); None for what is not shown."""


class SchemaError(Exception):
    """A 200 whose body is not the OpenAI shape."""


@contextmanager
def openai_shape() -> Iterator[None]:
    """Around the reading of an answer: a list where a text should be, or the like, is a SchemaError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise SchemaError(f"the answer has not the OpenAI shape ({type(error).__name__}: {error})") from error


class StreamReader:
    """Puts a streamed answer together again."""

    def __init__(self) -> None:
        self.text = ""
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] | None = None
        self._entries: list[Entry] | None = None
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._is_done = False

    def push(self, data: str) -> bool:
        """Take one event's data; True when it carried a token or text. SchemaError for anything malformed."""
        if self._is_done:
            raise SchemaError("the stream went on after [DONE]")
        if data == "[DONE]":
            self._is_done = True
            return False
        chunk = parse_object(data)
        if "error" in chunk:
            raise SchemaError(f"error in the stream: {error_text(data.encode())}")
        self._usage = chunk.get("usage") or self._usage
        carried = False
        with openai_shape():
            for choice in chunk.get("choices") or ():
                carried = self._push_choice(choice, chunk) or carried
        return carried

    def _push_choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> bool:
        if self._finish is not None and choice.get("finish_reason"):
            raise SchemaError("the stream has two finish reasons")
        text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
        ids = choice.get("token_ids")
        prompt_ids = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        entries = read_logprobs(choice.get("logprobs"))
        self.text += text
        self._finish = choice.get("finish_reason") or self._finish
        if prompt_ids is not None:
            self._prompt_ids = list(prompt_ids)
        if ids is not None:
            self._ids = [*(self._ids or ()), *ids]
        if entries is not None:
            self._entries = [*(self._entries or ()), *entries]
        return bool(text or ids)

    def finish(self) -> Observed:
        """The whole answer; SchemaError when the stream ended without its last event."""
        if not self._is_done:
            raise SchemaError("the stream ended without [DONE]")
        with openai_shape():
            return observation(self._prompt_ids, self._ids, self._entries, self.text, self._finish, self._usage)


def read_whole(body: Mapping[str, Any]) -> Observed:
    """An unstreamed answer; SchemaError when it is not the OpenAI shape."""
    with openai_shape():
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
        entries, usage = read_logprobs(choice.get("logprobs")), body.get("usage") or {}
        return observation(prompt_ids, choice.get("token_ids"), entries, text or "", choice.get("finish_reason"), usage)


def observation(
    prompt_ids: Any,
    ids: Any,
    entries: Sequence[Entry] | None,
    text: str,
    finish_reason: str | None,
    usage: Mapping[str, Any],
) -> Observed:
    """What was read, as an observation; logprobs count only where there is one for each token."""
    token_ids = as_ids(ids)
    if token_ids is None and entries and all(entry[1] is not None for entry in entries):
        token_ids = tuple(entry[1] for entry in entries if entry[1] is not None)
    is_whole = entries is not None and (token_ids is None or len(entries) == len(token_ids))
    tops = tuple(entry[2] for entry in entries or () if entry[2] is not None)
    details = usage.get("prompt_tokens_details") or {}
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))
    if not all(isinstance(count, int | None) for count in counts):
        raise TypeError(f"usage counts {counts}")
    if not (isinstance(text, str) and isinstance(finish_reason, str | None)):
        raise TypeError(f"text {text!r:.80}, finish reason {finish_reason!r:.80}")
    return Observed(
        prompt_token_ids=as_ids(prompt_ids),
        token_ids=token_ids,
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=counts[0],
        num_output_tokens=counts[1],
        num_cached_tokens=counts[2],
        logprobs=tuple(entry[0] for entry in entries or ()) if is_whole else None,
        tops=tops if is_whole and len(tops) == len(entries or ()) else None,
    )


def read_logprobs(logprobs: Any) -> list[Entry] | None:
    """The `logprobs` object of a choice, in the words of chat or of completions; None where there is none."""
    if not isinstance(logprobs, Mapping):
        return None
    if isinstance(logprobs.get("content"), list):
        return [chat_entry(entry) for entry in logprobs["content"]]
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or any(value is None for value in values):
        return None
    ids = logprobs.get("token_ids")
    known = ids if isinstance(ids, list) and len(ids) == len(values) else [None] * len(values)
    return [(float(value), token_id, None) for value, token_id in zip(values, known, strict=True)]


def chat_entry(entry: Mapping[str, Any]) -> Entry:
    """One token of a chat choice's `logprobs`; llama-server names its id `id`, this engine `token_id`."""
    tops = [(token_id(top), float(top["logprob"])) for top in entry.get("top_logprobs") or ()]
    known = tuple((one, value) for one, value in tops if one is not None)
    return float(entry["logprob"]), token_id(entry), known if known and len(known) == len(tops) else None


def token_id(entry: Mapping[str, Any]) -> int | None:
    """The id of a token in a `logprobs` entry, where it is shown."""
    found = entry.get("token_id", entry.get("id"))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def read_prompt_logprobs(body: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...] | None:
    """Logprob of each prompt token but the first: vLLM's `prompt_logprobs`, else those of an echo; None without."""
    with openai_shape():
        choice = (body.get("choices") or [{}])[0]
        rows = choice.get("prompt_logprobs") or body.get("prompt_logprobs")
        if isinstance(rows, list) and len(rows) == len(token_ids):
            return tuple(float(row[str(one)]["logprob"]) for row, one in zip(rows[1:], token_ids[1:], strict=True))
        echoed = (choice.get("logprobs") or {}).get("token_logprobs")
        if isinstance(echoed, list) and len(echoed) >= len(token_ids):
            return tuple(float(value) for value in echoed[1 : len(token_ids)])
    return None


def as_ids(values: Any) -> tuple[int, ...] | None:
    """A list of ids as a tuple, anything else as None; TypeError for a list of something else."""
    if isinstance(values, list) and not all(isinstance(value, int) for value in values):
        raise TypeError(f"token ids {values!r:.80}")
    return tuple(values) if isinstance(values, list) else None


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; SchemaError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"not JSON: {text!r:.80}") from error
    if not isinstance(value, dict):
        raise SchemaError(f"not a JSON object: {text!r:.80}")
    return value


def error_text(body: bytes) -> str:
    """The message of an OpenAI error body, or the beginning of whatever it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip()
