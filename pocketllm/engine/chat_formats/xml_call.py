"""Arguments written as elements, one a parameter, whose texts become JSON by the tool's schema."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.chat_formats.reading import Reader, Steps, decoded

Opening = tuple[str, bool | None]
"""A parameter's name, and whether it says itself that its value is a text."""


@dataclass(frozen=True)
class Elements:
    """How a format writes them: what opens a parameter up to its name, what ends the name, what closes it and the call.

    opening: reads the rest of an opening tag as the name.
    """

    begin: str
    begin_end: str
    end: str
    call_end: str
    opening: Callable[[str], Opening] = lambda text: (text.strip(), None)


def element_arguments(reader: Reader, name: str, elements: Elements) -> Steps[None]:
    """Read the parameters of a call to `name` up to its end and tell the call; each value is told when it is whole."""
    reader.begin_call(name)
    schema, is_first = reader.tools.get(name, {}), True
    reader.arguments("{")
    mark = yield from reader.until((elements.begin, elements.call_end), lambda text: None)
    while mark == elements.begin:
        tag, closing = yield from reader.text_until((elements.begin_end,))
        if closing is None:
            return  # cut inside a name: there is no value to tell
        key, is_text = elements.opening(tag)
        value, mark = yield from reader.text_until((elements.end, elements.begin, elements.call_end))
        if mark is None:
            return
        told = json_value(unpadded(value), parameter(schema, key), is_text)
        reader.arguments(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {told}")
        is_first = False
        if mark == elements.end:
            mark = yield from reader.until((elements.begin, elements.call_end), lambda text: None)
    if mark == elements.call_end:
        reader.arguments("}")


def unpadded(text: str) -> str:
    """A value without the line end after its opening tag and the one before its closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


def parameter(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The schema of one parameter; empty where it says nothing."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required, of each property; what is no schema says nothing."""
    properties, required = schema.get("properties"), schema.get("required")
    wanted = required if isinstance(required, list) else []
    return [
        (key, one if isinstance(one, Mapping) else {}, key in wanted)
        for key, one in (properties.items() if isinstance(properties, Mapping) else ())
    ]


def json_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names, through anyOf, oneOf and enum; empty where it names none."""
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        for one in branches if isinstance(branches, list) else ():
            found |= json_types(one) if isinstance(one, Mapping) else set()
    if not found and isinstance(schema.get("enum"), list):
        found = {type_name(value) for value in schema["enum"]}
    return found


def type_name(value: Any) -> str:
    """JSON schema's word for the type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_value(text: str, schema: Mapping[str, Any], is_text: bool | None) -> str:
    """The JSON of a value that was written bare: a text, unless the schema or the format names another type."""
    types = {"string"} if is_text else json_types(schema)
    if is_text is False and types <= {"string"}:
        types = {"object", "array", "number", "integer", "boolean", "null"}
    bare = text.strip()
    value = decoded({"True": "true", "False": "false", "None": "null"}.get(bare, bare))
    name = type_name(value)
    is_known = value is not None or bare in ("null", "None")
    if is_known and (name in types or (name == "integer" and "number" in types)):
        with suppress(ValueError):  # Python reads 1e999 as an infinity, which JSON cannot say
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
