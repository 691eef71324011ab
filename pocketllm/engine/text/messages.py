"""Checks the messages of a chat request and brings them into the form that templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.errors import RequestError


def normalize(messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Messages with keys that are None dropped, contents as text and tool-call arguments decoded.

    Content parts of type text are joined with a newline. RequestError names the message, and the part, that is wrong.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return [_message(message, index, arguments_as_text) for index, message in enumerate(messages)]


def _message(message: Any, index: int, arguments_as_text: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", param=where)
    result = {key: value for key, value in message.items() if value is not None}
    if "content" in result:
        result["content"] = _content(result["content"], f"{where}.content")
    elif message["role"] == "assistant":
        result["content"] = ""  # an assistant that only calls tools; templates concatenate the content unasked
    else:
        raise RequestError(f"{where} (role {message['role']}) has no content", param=f"{where}.content")
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls", arguments_as_text)
    return result


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be text or a list of parts, not {type(content).__name__}", param=where)
    return "\n".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with type and text", param=where)
    kind = part.get("type", "text")
    if kind != "text":
        raise RequestError(f"{where} has type {kind!r}; only text parts are supported", param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has no text", param=where)
    return str(part["text"])


def _tool_calls(calls: Any, where: str, arguments_as_text: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{number}]", arguments_as_text) for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str, arguments_as_text: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if "function" not in call:
        return _with_arguments(call, where, arguments_as_text)
    if not isinstance(call["function"], Mapping):
        raise RequestError(f"{where}.function must be an object", param=where)
    return {**call, "function": _with_arguments(call["function"], f"{where}.function", arguments_as_text)}


def _with_arguments(function: Mapping[str, Any], where: str, arguments_as_text: bool) -> dict[str, Any]:
    """Arguments come as an object or as JSON text of one; nothing, "" and "null" mean none."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        given = {}
    decoded = given
    if isinstance(given, str):
        try:
            decoded = json.loads(given)
        except ValueError as error:
            raise RequestError(f"{where}.arguments is not JSON: {error}", param=f"{where}.arguments") from error
    if not isinstance(decoded, Mapping):
        raise RequestError(f"{where}.arguments must be an object", param=f"{where}.arguments")
    if not arguments_as_text:
        return {**function, "arguments": dict(decoded)}
    return {**function, "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
