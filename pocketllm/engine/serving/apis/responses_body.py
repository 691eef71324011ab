"""POST /v1/responses, its body: read strictly, and turned into the chat that answers it. Nothing is kept after."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from pocketllm.engine.serving.prompts import SAMPLING_FIELDS
from pocketllm.engine.serving.protocol import INERT, ChatBody, Strict, check_extras, clipped, validate
from pocketllm.errors import RequestError

PASSED_ON = (*SAMPLING_FIELDS, "stop_token_ids", "ignore_eos", "cache_salt", "chat_template_kwargs", "stop", "n")
"""Fields of the chat endpoint that are not OpenAI's here and mean the same."""

INERT_HERE = INERT | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}

NEUTRAL_HERE: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
    "n": (1,),
}
"""What keeps state or cuts texts silently is not served; null, and these values, ask for neither."""

LOGPROBS = "message.output_text.logprobs"


class Reasoning(Strict):
    """How much the model should think, where its template reads that."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @model_validator(mode="after")
    def refuse_extras(self) -> "Reasoning":
        check_extras(self.model_extra or {}, {}, frozenset())
        if self.summary not in (None, "auto") or self.generate_summary not in (None, "auto"):
            raise ValueError("reasoning.summary is not supported: thoughts come as they are")
        return self


class TextOptions(Strict):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def refuse_extras(self) -> "TextOptions":
        check_extras(self.model_extra or {}, {}, frozenset())
        if self.verbosity not in (None, "medium"):
            raise ValueError("text.verbosity is not supported with this value")
        return self


class ResponsesBody(Strict):
    """OpenAI's Responses, without state."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_whole(self) -> "ResponsesBody":
        extras = {name: value for name, value in (self.model_extra or {}).items() if name not in PASSED_ON[:-1]}
        check_extras(extras, NEUTRAL_HERE, INERT_HERE)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens={clipped(self.max_output_tokens)} must be at least 1")
        unknown = sorted(set(self.include or ()) - {LOGPROBS, "reasoning.encrypted_content"})
        if unknown:
            raise ValueError(f"include cannot hold {unknown[0][:100]!r}")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ValueError(f"top_logprobs needs include={LOGPROBS!r}")
        check_extras(self.stream_options or {}, {"include_obfuscation": (False, True)}, frozenset())
        return self

    def chat(self) -> ChatBody:
        """The chat that answers it. Raises RequestError naming the field here that is wrong."""
        document: dict[str, Any] = {
            name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON
        }
        document |= {
            "messages": self._messages(),
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if LOGPROBS in (self.include or ()):
            document |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            document["tools"] = [as_chat_tool(number, tool) for number, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            document["tool_choice"] = as_chat_choice(self.tool_choice)
        if self.text and self.text.format is not None:
            document["response_format"] = as_chat_format(self.text.format)
        return validate(ChatBody, {name: value for name, value in document.items() if value is not None})

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            add_item(messages, item, f"input[{number}]")
        if not messages:
            raise RequestError("input holds no message", param="input")
        return messages


def add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """One item of the conversation as a chat message, or as part of the assistant's last one. Raises RequestError."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            messages.append({"role": item.get("role"), "content": content_of(item.get("content"), f"{where}.content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn = assistant_turn(messages)
            turn["tool_calls"] = [*(turn.get("tool_calls") or ()), call]
        case "function_call_output":
            content = content_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "reasoning":
            texts = [part.get("text") for part in item.get("content") or () if isinstance(part, dict)]
            if any(isinstance(text, str) for text in texts):
                turn = {"role": "assistant", "content": ""}
                turn["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
                messages.append(turn)
        case _:
            raise RequestError(f"{where} has type {str(kind)[:100]!r}, which is not supported", param=where)


def assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is going on, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def content_of(content: Any, where: str) -> Any:
    """Content in chat's words: its text parts have one type, not three."""
    if not isinstance(content, list):
        return content
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise RequestError(f"{where}[{number}] has type {str(kind)[:100]!r}; only texts are supported", param=where)
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def as_chat_tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A function in chat's shape; RequestError for a tool that would run on a server."""
    if tool.get("type") != "function":
        raise RequestError(f"tools[{number}] must have type 'function': nothing is run here", param=f"tools[{number}]")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def as_chat_choice(choice: str | dict[str, Any]) -> Any:
    """A tool choice in chat's shape."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def as_chat_format(form: dict[str, Any]) -> dict[str, Any]:
    """A text format in chat's shape."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
