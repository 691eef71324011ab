"""Reads an answer as it comes in pieces, and says what it is made of; the outcome does not depend on the pieces.

A format is a generator that asks a `Reader` for text and yields where there is not enough of it yet. Every question it
can ask has one answer for one text, whether it came at once or a character at a time.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where more text is needed."""
Tell = Callable[[str], None]

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's thought."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Tool call number `index` begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A stretch of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments
Tools = Mapping[str, Mapping[str, Any]]
"""Name → JSON schema of the parameters."""


class Trimmed:
    """Passes text on without the blanks at its two ends."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._held = ""
        self._has_begun = False

    def __call__(self, text: str) -> None:
        text = self._held + text
        if not self._has_begun:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        self._held = text[len(body) :]
        if body:
            self._has_begun = True
            self._tell(body)


class Reader:
    """The text so far, and the parts made of it.

    tools: what may be called. allows_parallel: whether calls after the first are kept. What has been told stays told;
    between `mark` and `rewind` nothing may be.
    """

    def __init__(self, tools: Tools, allows_parallel: bool = True) -> None:
        self.tools = tools
        self.num_calls = 0
        self._allows_parallel = allows_parallel
        self._parts: list[Part] = []
        self._text = ""
        self._place = 0
        self._has_ended = False
        self._marks = 0
        self._blanks = ""
        self._drops_blanks = False

    # -- the side that text comes from -------------------------------------------------------------------------------
    def feed(self, text: str) -> None:
        """More text."""
        if not self._marks:
            self._text, self._place = self._text[self._place :], 0
        self._text += text

    def end(self) -> None:
        """No more text."""
        self._has_ended = True

    def drain(self) -> list[Part]:
        """The parts since the last time, neighbors of one kind joined."""
        parts, self._parts = self._parts, []
        return joined(parts)

    # -- what a format tells -----------------------------------------------------------------------------------------
    def content(self, text: str) -> None:
        """Text for the user; blanks beside a call, or after a thought, are dropped, all others are kept."""
        text = self._blanks + text
        if self._drops_blanks:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        self._blanks = text[len(body) :]
        if body:
            self._drops_blanks = False
            self._parts.append(Content(body))

    def close(self) -> None:
        """The format has read all: blanks at the end belong to the text, unless a call was made."""
        if self._blanks and not self.num_calls:
            self._parts.append(Content(self._blanks))
        self._blanks = ""

    def reasoning(self, text: str) -> None:
        """Text of the model's thought."""
        if text:
            self._drops_blanks = True
            self._parts.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """A call begins."""
        self._blanks, self._drops_blanks = "", True
        self.num_calls += 1
        if self._keeps_call:
            self._parts.append(CallBegin(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """More JSON text of the arguments of the call that began last."""
        if text and self._keeps_call:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    @property
    def _keeps_call(self) -> bool:
        return self._allows_parallel or self.num_calls == 1

    # -- what a format asks ------------------------------------------------------------------------------------------
    def mark(self) -> int:
        """Remember this place for `rewind`, until `forget`."""
        self._marks += 1
        return self._place

    def rewind(self, place: int) -> None:
        """Read again from a place that was marked."""
        self._place = place

    def forget(self) -> None:
        """A mark is not needed any more."""
        self._marks -= 1

    def since(self, place: int) -> str:
        """The text from a mark to here."""
        return self._text[place : self._place]

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, fewer only at the end of the text."""
        while len(self._text) - self._place < count and not self._has_ended:
            yield
        return self._text[self._place : self._place + count]

    def skip(self, count: int) -> None:
        """Leave out characters that were peeked at."""
        self._place += count

    def skip_blanks(self) -> Steps[None]:
        """Leave out blanks."""
        while (yield from self.peek()) in tuple(BLANKS):
            self.skip(1)

    def takes(self, text: str) -> Steps[bool]:
        """Whether the text goes on with this; it is then left out."""
        for count in range(1, len(text) + 1):
            if (yield from self.peek(count)) != text[:count]:
                return False
        self.skip(len(text))
        return True

    def closes(self, mark: str) -> Steps[None]:
        """Leave out a mark that closes what was told, whole or cut by the end of the text; it may be missing."""
        if (yield from self.takes(mark)) or not self._has_ended:
            return
        rest = self._text[self._place :]
        if mark.startswith(rest):
            self.skip(len(rest))

    def until(self, marks: Sequence[str], tell: Tell) -> Steps[str | None]:
        """Pass text on up to the first mark, which is left out and returned; None at the end of the text.

        No mark may be the beginning of another.
        """
        while True:
            rest = self._text[self._place :]
            found = min(((at, mark) for mark in marks if (at := rest.find(mark)) >= 0), default=None)
            sure = len(rest) if self._has_ended else len(rest) - longest_beginning(rest, marks)
            if found is not None and (found[0] <= sure):
                self._tell(tell, found[0])
                self.skip(len(found[1]))
                return found[1]
            self._tell(tell, sure)
            if self._has_ended:
                return None
            yield

    def rest(self, tell: Tell) -> Steps[None]:
        """Pass on all that is left."""
        while True:
            self._tell(tell, len(self._text) - self._place)
            if self._has_ended:
                return
            yield

    def text_until(self, marks: Sequence[str]) -> Steps[tuple[str, str | None]]:
        """The text up to the first mark, whole, and the mark."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    def json_value(self, tell: Tell) -> Steps[bool]:
        """Pass on one JSON value as it is spelled; False where the text ends before it does.

        Only strings and brackets are looked at: what is between them is not checked.
        """
        yield from self.skip_blanks()
        first = yield from self.peek()
        depth, is_text = 0, False
        if not first:
            return False
        if first not in '{["':
            return (yield from self._scalar(tell))
        while True:
            if self._place == len(self._text):
                if self._has_ended:
                    return False
                yield
                continue
            start = self._place
            while self._place < len(self._text):
                character = self._text[self._place]
                if is_text and character == "\\":
                    if self._place + 1 == len(self._text) and not self._has_ended:
                        break  # the escape comes whole
                    self.skip(1)
                elif character == '"':
                    is_text = not is_text
                elif not is_text:
                    depth += (character in "{[") - (character in "}]")
                self._place = min(self._place + 1, len(self._text))
                if depth == 0 and not is_text:
                    tell(self._text[start : self._place])
                    return True
            if self._place > start:
                tell(self._text[start : self._place])
            elif not self._has_ended:
                yield  # half an escape

    def _scalar(self, tell: Tell) -> Steps[bool]:
        while (one := (yield from self.peek())) and one not in ",]}:" + BLANKS:
            tell(one)
            self.skip(1)
        return bool(one)

    def _tell(self, tell: Tell, count: int) -> None:
        if count > 0:
            tell(self._text[self._place : self._place + count])
            self.skip(count)


def longest_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a mark."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def joined(parts: list[Part]) -> list[Part]:
    """The same parts, neighbors of one kind made one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        match last, part:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(other, text) if index == other:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found


def decoded(text: str) -> Any:
    """A JSON text as a value; None where it is none."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> None:
    """For `json.loads`, which takes NaN and Infinity for numbers; JSON has neither. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")
