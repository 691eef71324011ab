"""What a chat format is: how it is recognized, how its answers are read, and how a call is spelled in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import Reader, Steps

THINK = Thought("<think>", "</think>")


@dataclass(frozen=True)
class Tool:
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""


def json_body(lark: Lark, tool: Tool) -> str:
    """Arguments as JSON."""
    return lark.json(tool.parameters)


@dataclass(frozen=True)
class Spelling:
    """How calls are written, for the grammar that forces one: head, calls with `between` between them, tail."""

    begin: Callable[[str], str]
    """From a tool's name to what stands before the arguments."""
    end: str
    body: Callable[[Lark, Tool], str] = json_body
    head: str = ""
    between: str = "\n"
    tail: str = ""


@dataclass(frozen=True)
class ChatFormat:
    """One format; immutable, shared by all requests."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of this format holds, all of them."""
    read: Callable[[Reader], Steps[None]]
    """Reads an answer after its thought."""
    spelling: Spelling
    marks: tuple[str, ...] = ()
    """Texts that some vocabularies have as control tokens: they must stay in the text to be read."""
    thoughts: tuple[Thought, ...] = (THINK,)
    """How a thought may be marked; the first one whose end the template holds."""
    reads_thought: bool = False
    """Whether `read` reads thoughts itself, wherever they stand."""
    preface: Callable[[Lark, bool], str] | None = None
    """What may, or must, stand before an answer that is held to a grammar, or (True) before a call, in Lark; None: only
    a thought."""


def call_grammar(chat_format: ChatFormat, tools: Sequence[Tool], lark: Lark, *, allows_parallel: bool) -> str:
    """A Lark grammar of one call to one of the tools, or several where that is allowed."""
    spelling = chat_format.spelling
    names = []
    for number, tool in enumerate(tools):
        names.append(f"call_{number}")
        parts = [lark.text(spelling.begin(tool.name)), spelling.body(lark, tool), lark.text(spelling.end)]
        lark.rule(names[-1], " ".join(filter(None, parts)))
    lark.rule("call", " | ".join(names))
    more = f"({lark.text(spelling.between)} call)*" if allows_parallel else ""
    start = [lark.text(spelling.head), "call", more, lark.text(spelling.tail)]
    return lark.source(" ".join(filter(None, start)))
