"""What a chat format is: how it is recognized, how its answers are read, and how a call is spelled in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pocketllm.engine.chat_formats.grammar import ANYTHING, Lark
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import Reader, Steps

THINK = Thought("<think>", "</think>")


@dataclass(frozen=True)
class Tool:
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    """Whether calls that the model makes of its own accord must obey `parameters` too."""


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
    trigger: str = ""
    """The first mark in head and begin, which no text for the user holds; "" where calls are told otherwise."""
    free: Callable[[Lark], str] | None = None
    """Without a trigger: a Lark expression of answers that are no calls, from the place where a call would begin."""


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
    return lark.source(calls(spelling, tools, lark, lark.text(spelling.head), allows_parallel))


def free_grammar(chat_format: ChatFormat, tools: Sequence[Tool], lark: Lark, *, allows_parallel: bool) -> str:
    """A Lark grammar of any answer whose calls, if it makes some, are calls to these tools."""
    spelling = chat_format.spelling
    if not spelling.trigger:
        assert spelling.free is not None, chat_format.name
        held = calls(spelling, tools, lark, lark.text(spelling.head), allows_parallel)
        return lark.source(f"{spelling.free(lark)} | {held}")
    # text up to the trigger, and from there no other way than a call
    assert spelling.trigger in spelling.head + spelling.begin(""), chat_format.name
    if spelling.head:
        head = f"{lark.up_to(spelling.trigger)} {lark.text(spelling.head.partition(spelling.trigger)[2])}"
        held = calls(spelling, tools, lark, head.rstrip(), allows_parallel)
        return lark.source(f"{lark.terminal(ANYTHING)} | {held}")
    rest = replace(spelling, begin=lambda name: spelling.begin(name).removeprefix(spelling.trigger))
    more = f"({lark.text(spelling.between + spelling.trigger)} call)*" if allows_parallel else ""
    held = calls(rest, tools, lark, lark.up_to(spelling.trigger), allows_parallel=False)
    return lark.source(f"{lark.terminal(ANYTHING)} | {held} {more}")


def calls(spelling: Spelling, tools: Sequence[Tool], lark: Lark, head: str, allows_parallel: bool) -> str:
    """An expression of a call, or several, after `head`; the rule `call` is one of them."""
    names = []
    for number, tool in enumerate(tools):
        names.append(f"call_{number}")
        parts = [lark.text(spelling.begin(tool.name)), spelling.body(lark, tool), lark.text(spelling.end)]
        lark.rule(names[-1], " ".join(filter(None, parts)))
    lark.rule("call", " | ".join(names))
    more = f"({lark.text(spelling.between)} call)*" if allows_parallel else ""
    return " ".join(filter(None, [head, "call", more, lark.text(spelling.tail)]))
