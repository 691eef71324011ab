"""POST /v1/messages, its body: Anthropic's, read strictly and turned into the chat that answers it."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from pocketllm.engine.serving.protocol import ChatBody, Strict, check_extras, validate
from pocketllm.errors import RequestError

INERT_HERE = frozenset({"metadata", "service_tier", "container", "inference_geo"})
NEUTRAL_HERE: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "context_management": (), "output_config": ()}
PASSED_ON = ("temperature", "top_p", "top_k", "seed", "chat_template_kwargs", "cache_salt")
"""Fields that mean in chat what they mean here; the last three are not Anthropic's."""


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]

    @model_validator(mode="after")
    def refuse_extras(self) -> "Turn":
        check_extras(self.model_extra or {}, {}, frozenset({"id"}))
        return self


class CountBody(Strict):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_whole(self) -> "CountBody":
        extras = {name: value for name, value in (self.model_extra or {}).items() if name not in PASSED_ON}
        check_extras(extras, NEUTRAL_HERE, INERT_HERE)
        if not self.messages:
            raise ValueError("messages is empty")
        return self

    def chat(self) -> ChatBody:
        """The chat that answers it. Raises RequestError."""
        document = {name: value for name, value in self.document().items() if value is not None}
        return validate(ChatBody, document)

    def document(self) -> dict[str, Any]:
        """The chat's fields; null where nothing was said."""
        found: dict[str, Any] = {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": texts(self.system, "system")})
        for number, turn in enumerate(self.messages):
            add_turn(messages, turn, f"messages[{number}]")
        found["messages"] = messages
        if self.tools:
            found["tools"] = [as_chat_tool(number, tool) for number, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            found |= as_chat_choice(self.tool_choice)
        if self.thinking is not None:
            wanted = self.thinking.get("type") in ("enabled", "adaptive")
            found["chat_template_kwargs"] = {"enable_thinking": wanted} | (found.get("chat_template_kwargs") or {})
        return found


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def document(self) -> dict[str, Any]:
        more = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}
        return super().document() | more


def texts(content: str | list[dict[str, Any]], where: str) -> str:
    """Text blocks as one text; RequestError for any other kind."""
    if isinstance(content, str):
        return content
    found = []
    for number, block in enumerate(content):
        if block.get("type") != "text":
            kind = str(block.get("type"))[:100]
            raise RequestError(f"{where}[{number}] has type {kind!r}; only texts are supported here", param=where)
        if not isinstance(block.get("text"), str):
            raise RequestError(f"{where}[{number}] of type 'text' needs a text", param=where)
        found.append(block["text"])
    return "\n".join(found)


def add_turn(messages: list[dict[str, Any]], turn: Turn, where: str) -> None:
    """One message as chat's: results of tools are messages of their own there. Raises RequestError."""
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        match block.get("type"):
            case "text":
                said.append(block)
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                content = texts(block.get("content") or "", place)
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case kind:
                raise RequestError(f"{place} has type {str(kind)[:100]!r}, which is not supported", param=where)
    if said or calls or thoughts:
        message: dict[str, Any] = {"role": turn.role, "content": texts(said, where)}
        more = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
        messages.append(message | {name: value for name, value in more.items() if value})


def as_chat_tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the client's in chat's shape; RequestError for one that would run on a server."""
    if tool.get("type", "custom") != "custom":
        where = f"tools[{number}]"
        raise RequestError(f"{where} has type {str(tool['type'])[:100]!r}: nothing is run here", param=where)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def as_chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """The fields of chat that say which tool is called. Raises RequestError."""
    words: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in words:
        chosen = words[kind]
    else:
        raise RequestError(f"tool_choice has type {str(kind)[:100]!r}, which is not known", param="tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen} | parallel
