"""What the text of an answer is made of beside its text: control tokens that stay visible, and a stretch of thought."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """A stretch of reasoning at the beginning of an answer, between two texts."""

    begin: str
    end: str
    is_open: bool = False
    """Whether the prompt has written `begin` already."""


@dataclass(frozen=True)
class Markup:
    """What a request says of its answer's form."""

    shown_token_ids: tuple[int, ...] = ()
    """Control tokens whose spelling is part of the text; the others leave none."""
    thought: Thought | None = None
    """Stop strings do not count inside it."""


class ThoughtGate:
    """Cuts a text, however it comes in pieces, into the thought it begins with and the rest."""

    def __init__(self, thought: Thought | None) -> None:
        self._thought = thought
        self._is_inside = thought is not None and thought.is_open
        self._is_outside = thought is None
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What now belongs to the thought, its marks included, and what to the rest."""
        thought = self._thought
        if self._is_outside or thought is None:
            return "", text
        buffer = self._held + text
        if self._is_inside:
            place = buffer.find(thought.end)
            if place < 0:
                # the end mark may come in pieces; what is told stays told
                self._held = buffer[max(len(buffer) - len(thought.end) + 1, 0) :]
                return text, ""
            self._is_outside, split = True, place + len(thought.end)
            told = len(buffer) - len(text)
            return buffer[told:split], buffer[split:]
        begun = buffer.lstrip()
        if begun.startswith(thought.begin):
            self._is_inside = True
            head = len(buffer) - len(begun) + len(thought.begin)
            self._held = ""
            inside, outside = self.push(buffer[head:])
            return buffer[:head] + inside, outside
        if thought.begin.startswith(begun):
            self._held = buffer
            return "", ""
        self._is_outside = True
        return "", buffer

    def flush(self) -> str:
        """What was held back, because the text ended before it was a thought; it belongs to the rest."""
        held = "" if self._is_inside or self._is_outside else self._held
        self._held = ""
        return held
