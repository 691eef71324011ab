"""Takes an answer apart as it comes: thought, content, tool calls."""

from pocketllm.engine.chat_formats.contract import ChatFormat
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import BLANKS, Content, Part, Reader, Steps, Tools, Trimmed


class AnswerSplitter:
    """One answer. The parts of all pushes together do not depend on how the text was cut.

    thought: how it may begin; tools: what may be called, None where nothing may, so that marks of calls stay text.
    is_call: it is held to calls, so that what is neither thought nor call is a piece of one that was cut: no content.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        thought: Thought | None,
        tools: Tools | None,
        allows_parallel: bool = True,
        is_call: bool = False,
    ) -> None:
        self._reader = Reader(tools or {}, allows_parallel)
        self._format = chat_format
        self._thought = None if chat_format.reads_thought else thought
        self._has_tools = tools is not None
        self._is_call = is_call
        self._steps = self._read()
        self._is_done = False
        self._advance()

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._reader.num_calls

    def push(self, text: str) -> list[Part]:
        """More text; returns what has become certain."""
        self._reader.feed(text)
        self._advance()
        return self._drain()

    def finish(self) -> list[Part]:
        """No more text: what was held back."""
        self._reader.end()
        self._advance()
        self._reader.close()
        return self._drain()

    def _drain(self) -> list[Part]:
        parts = self._reader.drain()
        return [part for part in parts if not isinstance(part, Content)] if self._is_call else parts

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._steps, StopIteration) is StopIteration

    def _read(self) -> Steps[None]:
        reader = self._reader
        if self._thought is not None:
            yield from read_thought(reader, self._thought)
        if self._has_tools or self._format.reads_thought:
            yield from self._format.read(reader)
        yield from reader.rest(reader.content)


def read_thought(reader: Reader, thought: Thought) -> Steps[None]:
    """A thought at the beginning of an answer, without its marks and the blanks around it."""
    place = reader.mark()
    yield from reader.skip_blanks()
    has_mark = yield from reader.takes(thought.begin)
    if not has_mark and not thought.is_open:
        reader.rewind(place)
    reader.forget()
    if has_mark or thought.is_open:
        yield from reader.until((thought.end,), Trimmed(reader.reasoning))
        while (yield from reader.peek()) in tuple(BLANKS):
            reader.skip(1)
