"""POST /v1/responses, its answer: one document, or OpenAI's sequence of named events with running numbers."""

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from pocketllm.engine.serving.apis.parts import Moment, Part, PartEvent, PartKind, Parts
from pocketllm.engine.serving.apis.responses_body import LOGPROBS, ResponsesBody
from pocketllm.engine.serving.failures import Failure
from pocketllm.engine.serving.stream import Usage, named_event


class ResponseWriter:
    """Writes one answer; obeys `calls.Writer`."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._body = body
        self._model = model
        self._id = f"resp_{uuid4().hex}"
        self._created_s = int(time.time())
        self._parts = Parts()
        self._item_ids: dict[int, str] = {}
        self._number = 0
        self._is_cut = False
        """Whether the last part was not written to its end."""

    def begin(self) -> Iterator[bytes]:
        """Before the first token."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._document("in_progress", None))

    def feed(self, choice: dict[str, Any]) -> Iterator[bytes]:
        """A choice of a chat chunk."""
        for event in self._parts.feed(choice):
            yield from self._events(event)

    def finish(self, reason: str, stop: str | None, usage: Usage) -> Iterator[bytes]:
        """The answer is complete."""
        self._is_cut = reason == "length"
        for event in (*self._parts.open_empty_text(), *self._parts.end()):
            yield from self._events(event)
        yield self._event(f"response.{self._status(reason)}", response=self.document(reason, stop, usage))

    def fail(self, failure: Failure) -> bytes:
        """What went wrong once the stream had begun."""
        self._is_cut = True
        error = {"code": "server_error", "message": failure.body()["error"]["message"]}
        return self._event("response.failed", response=self._document("failed", None) | {"error": error})

    def document(self, reason: str, stop: str | None, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        self._is_cut = reason == "length"
        status = self._status(reason)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._document(status, usage) | {"incomplete_details": details}

    @staticmethod
    def _status(reason: str) -> str:
        return "incomplete" if reason == "length" else "completed"

    def _document(self, status: str, usage: Usage | None) -> dict[str, Any]:
        body, extras = self._body, self._body.model_extra or {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [self._item(part, status != "in_progress") for part in self._parts.all],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": in_force(extras.get("temperature")),
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": in_force(extras.get("top_p")),
            "truncation": "disabled",
            "usage": None if usage is None else usage_document(usage, self._has_thought),
            "user": None,
        }

    @property
    def _has_thought(self) -> bool:
        return any(part.kind is PartKind.THOUGHT for part in self._parts.all)

    def _events(self, event: PartEvent) -> Iterator[bytes]:
        part = event.part
        place = {"output_index": part.index}
        named = {"item_id": self._item_id(part)} | place
        inside = named | {"content_index": 0}
        kind = STEMS[part.kind]
        match event.moment:
            case Moment.OPENS:
                yield self._event("response.output_item.added", **place, item=self._item(part, False, is_new=True))
                if part.kind is not PartKind.CALL:
                    yield self._event("response.content_part.added", **inside, part=self._content(part))
            case Moment.GROWS if part.kind is PartKind.CALL:
                yield self._event(f"{kind}.delta", **named, delta=event.text)
            case Moment.GROWS:
                told = {"logprobs": event.logprobs} if part.kind is PartKind.TEXT else {}
                yield self._event(f"{kind}.delta", **inside, delta=event.text, **told)
            case Moment.CLOSES:
                yield from self._closing(part, kind, named, inside)
                yield self._event("response.output_item.done", **place, item=self._item(part, True))

    def _closing(self, part: Part, kind: str, named: dict[str, Any], inside: dict[str, Any]) -> Iterator[bytes]:
        if part.kind is PartKind.CALL:
            yield self._event(f"{kind}.done", **named, name=part.name, arguments=part.text)
            return
        told = {"logprobs": part.logprobs} if part.kind is PartKind.TEXT else {}
        yield self._event(f"{kind}.done", **inside, text=part.text, **told)
        yield self._event("response.content_part.done", **inside, part=self._content(part))

    def _item_id(self, part: Part) -> str:
        return self._item_ids.setdefault(part.index, f"{ID_STEMS[part.kind]}_{uuid4().hex}")

    def _item(self, part: Part, is_done: bool, is_new: bool = False) -> dict[str, Any]:
        is_cut = self._is_cut and part is self._parts.all[-1]
        head = {"id": self._item_id(part), "status": "in_progress" if not is_done else ENDS[is_cut]}
        content = [] if is_new else [self._content(part)]
        match part.kind:
            case PartKind.TEXT:
                return head | {"type": "message", "role": "assistant", "content": content}
            case PartKind.THOUGHT:
                return head | {"type": "reasoning", "summary": [], "content": content}
            case PartKind.CALL:
                call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return head | {"type": "function_call"} | call

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.THOUGHT:
            return {"type": "reasoning_text", "text": part.text}
        told = part.logprobs if LOGPROBS in (self._body.include or ()) else []
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(told)}

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number} | values)


STEMS = {
    PartKind.TEXT: "response.output_text",
    PartKind.THOUGHT: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
}
ENDS = {False: "completed", True: "incomplete"}
ID_STEMS = {PartKind.TEXT: "msg", PartKind.THOUGHT: "rs", PartKind.CALL: "fc"}


def in_force(asked: float | None) -> float:
    """A temperature or a top_p as it is used: null is the default."""
    return 1.0 if asked is None else asked


def usage_document(usage: Usage, has_thought: bool) -> dict[str, Any]:
    """Tokens in the Responses API's words; those of a thought are not counted apart, so only their absence is told."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {} if has_thought else {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
