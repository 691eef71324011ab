"""Grammars of arguments that are written as elements: texts bare, everything else as JSON."""

from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.engine.chat_formats.contract import Tool
from pocketllm.engine.chat_formats.grammar import Lark, literal
from pocketllm.engine.chat_formats.xml_call import json_types, properties_of


def elements_body(lark: Lark, tool: Tool, begin: Callable[[str], str], end: str) -> str:
    """The parameters of a tool in the order of its schema, those not required left out at will; "" for none."""
    parts = []
    for key, schema, is_required in properties_of(tool.parameters):
        element = lark.made(f"{lark.text(begin(key))} {element_value(lark, with_definitions(schema, tool), end)}")
        parts.append(element if is_required else f"{element}?")
    return " ".join(parts)


def with_definitions(schema: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """One parameter's schema, with what its references may name."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema}


def element_value(lark: Lark, schema: Mapping[str, Any], end: str) -> str:
    """One value and what closes it."""
    types = json_types(schema)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(literal, choices))}) {lark.text(end)}"
    if not types or "string" in types:
        return lark.up_to(end)
    return f"{lark.json(schema)} {lark.text(end)}"
