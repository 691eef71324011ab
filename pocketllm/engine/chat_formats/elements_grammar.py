"""Grammars of arguments that are written as elements: texts bare, everything else as JSON."""

from collections.abc import Callable

from pocketllm.engine.chat_formats.contract import Tool
from pocketllm.engine.chat_formats.grammar import Lark, literal
from pocketllm.engine.chat_formats.xml_call import json_types


def elements_body(lark: Lark, tool: Tool, begin: Callable[[str], str], end: str) -> str:
    """The parameters of a tool in the order of its schema, those not required left out at will; "" for none."""
    properties = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    parts = []
    for key, schema in properties.items():
        element = lark.made(f"{lark.text(begin(key))} {element_value(lark, with_definitions(schema, tool), end)}")
        parts.append(element if key in required else f"{element}?")
    return " ".join(parts)


def with_definitions(schema: object, tool: Tool) -> object:
    """One parameter's schema, with what its references may name."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema} if isinstance(schema, dict) else schema


def element_value(lark: Lark, schema: object, end: str) -> str:
    """One value and what closes it."""
    known = schema if isinstance(schema, dict) else {}
    types = json_types(known)
    choices = known.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(literal, choices))}) {lark.text(end)}"
    if not types or "string" in types:
        return lark.up_to(end)
    return f"{lark.json(known)} {lark.text(end)}"
