"""FunctionGemma and Gemma 4: call:NAME{key:value, …} between marks, texts between quote tokens, keys bare."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling, Tool
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import Reader, Steps, refuse_constant
from pocketllm.engine.chat_formats.xml_call import json_types, properties_of

THOUGHT = Thought("<|channel>thought", "<channel|>")
MAX_DEPTH = 32


@dataclass(frozen=True)
class Marks:
    """The marks of one version."""

    begin: str
    end: str
    quote: str

    def read(self, reader: Reader) -> Steps[None]:
        """Calls between marks; a call is told when it is whole."""
        while (yield from reader.until((self.begin,), reader.content)) is not None:
            text, closing = yield from reader.text_until((self.end,))
            found = re.fullmatch(r"\s*call:\s*([^\s{]+)\s*(\{.*)", text, re.DOTALL)
            if found is None:
                reader.content(self.begin + text + (closing or ""))
                continue
            reader.begin_call(found[1])
            reader.arguments(as_json(found[2], self.quote))

    def body(self, lark: Lark, tool: Tool) -> str:
        """The members of the arguments, in the order of the schema."""
        members = [
            (is_required, lark.made(f"{lark.text(f'{key}:')} {self.value(lark, schema)}"))
            for key, schema, is_required in properties_of(tool.parameters)
        ]
        return separated(lark, members)

    def value(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        """A value of a schema's type; of an unknown one, a text."""
        types = json_types(schema)
        simple = {"integer", "number", "boolean", "null"}
        if types and types <= simple:
            return lark.json({"type": sorted(types)})
        if types == {"array"}:
            items = schema.get("items")
            item = self.value(lark, items if isinstance(items, Mapping) else {})
            return lark.made(f'"[" ({item} ("," {item})*)? "]"')
        if types == {"object"}:
            return lark.made(f'"{{" {self.body(lark, Tool("", schema))} "}}"')
        return f"{lark.text(self.quote)} {lark.up_to(self.quote)}"


def separated(lark: Lark, members: list[tuple[bool, str]]) -> str:
    """Members with commas between, those not required left out at will."""
    rest = '""'
    for number in range(len(members) - 1, -1, -1):
        is_required, member = members[number]
        # what may follow this member, and what may stand here when nothing has come yet
        after = rest_after(lark, members[number + 1 :])
        here = f"{member} {after}"
        rest = lark.made(here if is_required else f"{here} | {rest}")
    return rest


def rest_after(lark: Lark, members: list[tuple[bool, str]]) -> str:
    """The members that may follow one that has come."""
    return " ".join(f'("," {member})' + ("" if is_required else "?") for is_required, member in members)


def as_json(text: str, quote: str) -> str:
    """Arguments as JSON; what cannot be read ends where it begins."""
    pieces: list[str] = []
    with suppress(IndexError, ValueError):  # cut short: the client gets what came, as of every answer that was cut
        take_value(text, 0, quote, pieces, 0)
    return "".join(pieces)


def take_value(text: str, place: int, quote: str, out: list[str], depth: int) -> int:
    """Write one value as JSON; returns where it ends. ValueError or IndexError where the text breaks off."""
    place = past_blanks(text, place)
    if depth > MAX_DEPTH:
        raise ValueError("nests too deep")
    if text.startswith(quote, place):
        end = text.index(quote, place + len(quote))
        out.append(json.dumps(text[place + len(quote) : end], ensure_ascii=False))
        return end + len(quote)
    if text[place] in "{[":
        return take_members(text, place, quote, out, depth)
    end = place
    while text[end] not in ",}]":
        end += 1
    bare = text[place:end].strip()
    out.append(bare if is_json(bare) else json.dumps(bare, ensure_ascii=False))
    return end


def take_members(text: str, place: int, quote: str, out: list[str], depth: int) -> int:
    """Write an object or a list."""
    is_object, is_first = text[place] == "{", True
    closing = "}" if is_object else "]"
    out.append(text[place])
    place = past_blanks(text, place + 1)
    while text[place] != closing:
        if not is_first:
            out.append(", ")
        is_first = False
        if is_object:
            end = text.index(":", place)
            out.append(json.dumps(text[place:end].strip().removeprefix(quote).removesuffix(quote)) + ": ")
            place = end + 1
        place = past_blanks(text, take_value(text, place, quote, out, depth + 1))
        if text[place] == ",":
            place = past_blanks(text, place + 1)
        elif text[place] != closing:
            raise ValueError("no comma")
    out.append(closing)
    return place + 1


def past_blanks(text: str, place: int) -> int:
    """The next place that holds no blank."""
    while text[place].isspace():
        place += 1
    return place


def is_json(text: str) -> bool:
    """Whether this is a number, true, false or null."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return False
    return True


def made(name: str, marks: Marks) -> ChatFormat:
    """The format of one version."""
    spelling = Spelling(
        lambda tool: f"{marks.begin}call:{tool}{{", f"}}{marks.end}", marks.body, between="", trigger=marks.begin
    )
    return ChatFormat(
        name,
        (marks.begin,),
        marks.read,
        spelling,
        (marks.begin, marks.end, marks.quote, "<|channel>", "<channel|>"),
        thoughts=(THOUGHT,),
    )


FORMAT = made("gemma4", Marks("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = made("function_gemma", Marks("<start_function_call>", "<end_function_call>", "<escape>"))
