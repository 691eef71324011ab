"""POST /v1/messages, its answer: Anthropic's document, or its sequence of named events."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from pocketllm.engine.serving.apis.parts import Moment, Part, PartEvent, PartKind, Parts
from pocketllm.engine.serving.failures import Failure
from pocketllm.engine.serving.stream import Usage, named_event


class MessageWriter:
    """Writes one answer; obeys `calls.Writer`."""

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._id = f"msg_{uuid4().hex}"
        self._parts = Parts()

    def begin(self) -> Iterator[bytes]:
        """Before the first token."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0} | NO_CACHE
        yield named_event("message_start", {"type": "message_start", "message": self._document([], None, None, usage)})

    def feed(self, choice: dict[str, Any]) -> Iterator[bytes]:
        """A choice of a chat chunk."""
        for event in self._parts.feed(choice):
            yield from self._events(event)

    def finish(self, reason: str, stop: str | None, usage: Usage) -> Iterator[bytes]:
        """The answer is complete."""
        for event in self._parts.end():
            yield from self._events(event)
        delta = {"stop_reason": stop_reason(reason, stop), "stop_sequence": stop}
        yield named_event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage_document(usage)})
        yield named_event("message_stop", {"type": "message_stop"})

    def fail(self, failure: Failure) -> bytes:
        """What went wrong once the stream had begun."""
        return named_event("error", failure.anthropic_body())

    def document(self, reason: str, stop: str | None, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        content = [block(part) for part in self._parts.all]
        return self._document(content, stop_reason(reason, stop), stop, usage_document(usage))

    def _document(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _events(self, event: PartEvent) -> Iterator[bytes]:
        part = event.part
        match event.moment:
            case Moment.OPENS:
                values = {"content_block": block(Part(part.kind, part.index, "", part.call_id, part.name))}
            case Moment.GROWS:
                values = {"delta": DELTAS[part.kind] | {TEXT_FIELDS[part.kind]: event.text}}
            case Moment.CLOSES:
                values = {}
        kind = KINDS[event.moment]
        yield named_event(kind, {"type": kind, "index": part.index} | values)


NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
KINDS = {
    Moment.OPENS: "content_block_start",
    Moment.GROWS: "content_block_delta",
    Moment.CLOSES: "content_block_stop",
}
DELTAS: dict[PartKind, dict[str, Any]] = {
    PartKind.TEXT: {"type": "text_delta"},
    PartKind.THOUGHT: {"type": "thinking_delta"},
    PartKind.CALL: {"type": "input_json_delta"},
}
TEXT_FIELDS = {PartKind.TEXT: "text", PartKind.THOUGHT: "thinking", PartKind.CALL: "partial_json"}


def block(part: Part) -> dict[str, Any]:
    """One part as a content block."""
    match part.kind:
        case PartKind.TEXT:
            return {"type": "text", "text": part.text}
        case PartKind.THOUGHT:
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case PartKind.CALL:
            try:
                arguments = json.loads(part.text or "{}")
            except ValueError:
                arguments = {}  # the answer was cut short inside them
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def stop_reason(reason: str, stop: str | None) -> str:
    """Anthropic's word for why an answer ended."""
    if reason == "tool_calls":
        return "tool_use"
    if reason == "length":
        return "max_tokens"
    return "end_turn" if stop is None else "stop_sequence"


def usage_document(usage: Usage) -> dict[str, int]:
    """Tokens in Anthropic's words: what came from the cache is counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }
