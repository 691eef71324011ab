"""For chat templates without a place for tools: they are told in the system message, and called as in Hermes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pocketllm.engine.chat_formats.families.hermes import BEGIN, END
from pocketllm.engine.chat_formats.families.hermes import FORMAT as HERMES
from pocketllm.engine.text.messages import normalize

EXAMPLE = '{"name": "its name", "arguments": {"parameter": "value"}}'

FORMAT = replace(HERMES, name="generic", signs=())


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, and earlier calls and their results as texts."""
    has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    if not tools and not has_calls:
        return [dict(message) for message in messages]
    told = [plain(message) for message in normalize(messages)]
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = (
        f"These functions are available, one JSON description a line:\n{listed}\n\n"
        f"To call a function, answer with\n{BEGIN}\n{EXAMPLE}\n{END}"
    )
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without tool calls or the role `tool`, saying the same."""
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = [call.get("function", call) for call in message["tool_calls"]]
    called = [{"name": call.get("name"), "arguments": call["arguments"]} for call in calls]
    texts = [f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}" for call in called]
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *texts]))}
