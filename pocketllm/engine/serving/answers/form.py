"""The form of a chat answer: what its model's format, the tools, the thought and the grammar make of it together."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from pocketllm.engine.chat_formats.contract import ChatFormat, call_grammar, free_grammar
from pocketllm.engine.chat_formats.families import generic
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.markup import Markup, Thought
from pocketllm.engine.chat_formats.registry import format_of, thought_of
from pocketllm.engine.chat_formats.splitter import AnswerSplitter
from pocketllm.engine.serving.answers.structured import StructuredFields, constraint_of
from pocketllm.engine.serving.answers.tools import Offer
from pocketllm.engine.serving.settings import ServedTokenizer
from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import RequestError

known_format = lru_cache(maxsize=8)(format_of)

BLANK_LINES = r"/\n{0,2}/"
"""Between a thought and the answer."""


class HasSource(Protocol):
    """A chat template as text."""

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class ChatForm:
    """How one chat answer is held and read."""

    chat_format: ChatFormat
    thought: Thought | None = None
    offer: Offer = field(default_factory=Offer)
    markup: Markup = field(default_factory=Markup)
    constraint: Constraint | None = None

    @property
    def is_split(self) -> bool:
        """Whether the text is more than content."""
        return self.thought is not None or bool(self.offer.tools) or self.chat_format.reads_thought

    def splitter(self) -> AnswerSplitter:
        """What takes one answer apart."""
        tools = {tool.name: tool.parameters for tool in self.offer.tools} if self.offer.tools else None
        is_call = bool(self.offer.forced)
        return AnswerSplitter(self.chat_format, self.thought, tools, self.offer.allows_parallel, is_call)


def template_arguments(
    template: HasSource, messages: list[dict[str, Any]], offer: Offer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and what a template is told beside them, where tools are offered or were called."""
    if known_format(template.source).name == generic.FORMAT.name:
        return generic.with_tools(messages, offer.given), {}
    return messages, {"tools": list(offer.given)} if offer.given else {}


def chat_form(
    body: StructuredFields, offer: Offer, template: HasSource, prompt: str, tokenizer: ServedTokenizer
) -> ChatForm:
    """The form of the answer to a rendered prompt. Raises RequestError for what cannot be held to."""
    chat_format = known_format(template.source)
    thought = thought_of(chat_format, template.source, prompt)
    form = ChatForm(chat_format, thought, offer)
    ids = control_ids(form, tokenizer)
    shown = tuple(sorted(ids.values())) if form.is_split else ()
    held = held_to(body, form, Lark(ids))
    return ChatForm(chat_format, thought, offer, Markup(shown, thought), held)


def held_after_thought(asked: Constraint, template: HasSource, prompt: str, tokenizer: ServedTokenizer) -> Constraint:
    """What a chat answer is held to where no tools are offered: `asked`, after the thought that may come first."""
    chat_format = known_format(template.source)
    form = ChatForm(chat_format, thought_of(chat_format, template.source, prompt))
    return asked.after(preface(Lark(control_ids(form, tokenizer)), form, is_call=False))


def control_ids(form: ChatForm, tokenizer: ServedTokenizer) -> dict[str, int]:
    """Those marks of a form that are control tokens."""
    thought = (form.thought.begin, form.thought.end) if form.thought else ()
    return tokenizer.control_ids({*form.chat_format.marks, *thought})


def held_to(body: StructuredFields, form: ChatForm, lark: Lark) -> Constraint | None:
    """The grammar of the whole answer, its thought included; None where it is free."""
    asked = constraint_of(body)
    offer, chat_format = form.offer, form.chat_format
    if offer.forced:
        source = call_grammar(chat_format, offer.forced, lark, allows_parallel=offer.allows_parallel)
        held = constraint.lark(source, "tools", "tools")
        before = Lark(lark.control_ids)
        return held.after(preface(before, form, is_call=True))
    if asked is None:
        return strictly_called(form, lark)
    before = Lark(lark.control_ids)
    if offer.tools:
        if chat_format.preface is not None:
            raise RequestError(
                f"{asked.param} and tools cannot be combined in this model's format: force a call, or offer none",
                param=asked.param,
            )
        source = call_grammar(chat_format, offer.tools, lark, allows_parallel=offer.allows_parallel)
        asked = asked.or_else(constraint.lark(source, "tools", "tools"))
    return asked.after(preface(before, form, is_call=False))


def strictly_called(form: ChatForm, lark: Lark) -> Constraint | None:
    """A free answer whose calls obey their schemas, where a tool is strict; None where none is."""
    offer = form.offer
    if not any(tool.is_strict for tool in offer.tools):
        return None
    # a tool that is not strict may be called with any object
    tools = [tool if tool.is_strict else replace(tool, parameters={"type": "object"}) for tool in offer.tools]
    source = free_grammar(form.chat_format, tools, lark, allows_parallel=offer.allows_parallel)
    held = constraint.lark(source, "tools", "tools")
    return held.after(preface(Lark(lark.control_ids), form, is_call=True))


def preface(lark: Lark, form: ChatForm, is_call: bool) -> str:
    """Rules of what may stand before the held part of an answer: its thought; "" for nothing."""
    chat_format, thought = form.chat_format, form.thought
    if chat_format.preface is not None:
        return lark.rules("preface", chat_format.preface(lark, is_call))
    if thought is None:
        return ""
    rest = f"{lark.up_to(thought.end)} {BLANK_LINES}"
    return lark.rules("preface", rest if thought.is_open else f"(/\\n?/ {lark.text(thought.begin)} {rest})?")
