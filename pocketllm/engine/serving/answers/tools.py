"""Tools of a chat request: what may be called, what must be, and how calls stand in a conversation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from pocketllm.engine.chat_formats.contract import Tool
from pocketllm.engine.serving.answers.structured import refuse_others
from pocketllm.errors import RequestError

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class ToolFields(BaseModel):
    """What a chat body says of tools; checked by `offered`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True)
class Offer:
    """The tools that may be called.

    forced: those of which one must be; none where the model is free.
    """

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    given: tuple[Mapping[str, Any], ...] = ()
    """As the client gave them, for the template."""
    allows_parallel: bool = True
    """Whether there may be several calls: never where one function is asked for by name, as in OpenAI's API."""


def offered(body: ToolFields) -> Offer:
    """The tools of a body; none where `tool_choice` is none. Raises RequestError naming what is wrong."""
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools has {len(given)} entries, the limit is {MAX_TOOLS}", param="tools")
    tools = tuple(read_tool(tool, f"tools[{number}]") for number, tool in enumerate(given))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools has two functions with the name {twice!r}", param="tools")
    forced = chosen(body.tool_choice, tools)
    if body.tool_choice == "none":
        return Offer()
    is_named = isinstance(body.tool_choice, dict)
    return Offer(tools, forced, tuple(given), body.parallel_tool_calls is not False and not is_named)


def chosen(choice: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of which one must be called."""
    name = "tool_choice"
    if choice in (None, "none", "auto"):
        return ()
    if isinstance(choice, dict) and choice.get("type") in ("none", "auto", "required"):
        kind = choice["type"]
        raise RequestError(f"none, auto and required are texts, not objects: tool_choice={kind!r}", param=name)
    if not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", param=name)
    if choice == "required":
        return tools
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        kind = choice.get("type") if isinstance(choice, dict) else choice
        raise RequestError(
            f"tool_choice {str(kind)[:100]!r} is not none, auto, required or a function by name", param=name
        )
    refuse_others(choice, {"type", "function"}, name)
    refuse_others(choice["function"], {"name"}, f"{name}.function")
    wanted = choice["function"].get("name")
    found = tuple(tool for tool in tools if tool.name == wanted)
    if not found:
        raise RequestError(f"tool_choice names {str(wanted)[:100]!r}, which is not among the tools", param=name)
    return found


def read_tool(given: Mapping[str, Any], where: str) -> Tool:
    """One entry of `tools`."""
    if given.get("type", "function") != "function":
        raise RequestError(f"{where} has type {str(given.get('type'))[:100]!r}; only functions are served", param=where)
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object", param=where)
    refuse_others(given, {"type", "function"}, where)
    refuse_others(function, {"name", "description", "parameters", "strict"}, f"{where}.function")
    name, described = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or _", param=where)
    if not isinstance(described, str | None):
        raise RequestError(f"{where}.function.description must be a text", param=where)
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.function.strict must be true or false", param=where)
    parameters = read_parameters(function.get("parameters"), f"{where}.function.parameters")
    return Tool(name, parameters, bool(function.get("strict")))


def read_parameters(given: Any, where: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; none given takes any object."""
    if given is None:
        return {"type": "object"}
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be a JSON schema, not {type(given).__name__}", param=where)
    properties, required = given.get("properties", {}), given.get("required", [])
    if given.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise RequestError(f"{where} must be a schema of type object", param=where)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required must be a list of names", param=where)
    return {"type": "object", **given}
