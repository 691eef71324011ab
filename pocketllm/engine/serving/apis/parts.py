"""The parts of a chat answer in their order: thoughts, text and tool calls, as they open, grow and close.

The endpoints that are not OpenAI's chat write an answer part by part; they read it from the chunks of a chat stream, so
that every endpoint says the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class PartKind(Enum):
    """What a part is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class Moment(Enum):
    """What becomes of a part."""

    OPENS = "opens"
    GROWS = "grows"
    CLOSES = "closes"


@dataclass
class Part:
    """One part of an answer; of a tool call, `text` is its arguments."""

    kind: PartKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class PartEvent:
    """`text` and `logprobs` are what came now; empty but where the part grows."""

    moment: Moment
    part: Part
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Parts:
    """All parts of one answer; at most the last is open."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._is_open = False

    def feed(self, choice: dict[str, Any]) -> Iterator[PartEvent]:
        """What one choice of a chat chunk does to the parts."""
        delta = choice["delta"]
        told = (choice.get("logprobs") or {}).get("content") or []
        if delta.get("reasoning_content"):
            yield from self._grow(PartKind.THOUGHT, delta["reasoning_content"], [])
        if delta.get("content") or told:
            yield from self._grow(PartKind.TEXT, delta.get("content") or "", told)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id"):
                yield from self._open(Part(PartKind.CALL, len(self.all), "", call["id"], function.get("name") or ""))
            if function.get("arguments"):
                yield from self._grow(PartKind.CALL, function["arguments"], [])

    def end(self) -> Iterator[PartEvent]:
        """The answer is complete."""
        if self._is_open:
            self._is_open = False
            yield PartEvent(Moment.CLOSES, self.all[-1])

    def _open(self, part: Part) -> Iterator[PartEvent]:
        yield from self.end()
        self.all.append(part)
        self._is_open = True
        yield PartEvent(Moment.OPENS, part)

    def _grow(self, kind: PartKind, text: str, logprobs: list[dict[str, Any]]) -> Iterator[PartEvent]:
        if not self._is_open or self.all[-1].kind is not kind:
            yield from self._open(Part(kind, len(self.all)))
        part = self.all[-1]
        part.text += text
        part.logprobs += logprobs
        yield PartEvent(Moment.GROWS, part, text, logprobs)

    def open_empty_text(self) -> Iterator[PartEvent]:
        """An answer without any part still has a text."""
        if not self.all:
            yield from self._open(Part(PartKind.TEXT, 0))
