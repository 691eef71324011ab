"""The deltas of a chat answer, and the message that they add up to."""

from typing import Any
from uuid import uuid4

from pocketllm.engine.chat_formats.reading import CallArguments, CallBegin, Content, Part, Reasoning
from pocketllm.engine.serving.answers.form import ChatForm


class ChoiceDeltas:
    """One choice's text as deltas; the same ones streamed and whole."""

    def __init__(self, form: ChatForm) -> None:
        self._splitter = form.splitter()

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self._splitter.num_calls > 0

    def push(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What more text becomes; is_last: it is the end of the answer."""
        parts = self._splitter.push(text) if text else []
        if is_last:
            parts += self._splitter.finish()
        return [delta(part) for part in parts]


def delta(part: Part) -> dict[str, Any]:
    """One part as OpenAI's delta; a call's id and name come once, with its first."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a whole answer. `content` is null where there are only calls."""
    content = "".join(one["content"] for one in deltas if "content" in one)
    reasoning = "".join(one["reasoning_content"] for one in deltas if "reasoning_content" in one)
    calls: list[dict[str, Any]] = []
    for one in deltas:
        for call in one.get("tool_calls", ()):
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    found: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    found["refusal"] = None
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found
