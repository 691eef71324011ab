"""The bodies of OpenAI's API that are served, strictly typed and bounded.

What is not served is in one of three lists: INERT fields never change an answer and are ignored; NEUTRAL fields are
accepted at the values that ask for nothing (null always is one); everything else is refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pocketllm.engine.lifecycle.sampling.params import MAX_LOGPROBS
from pocketllm.engine.serving.answers.structured import StructuredFields
from pocketllm.engine.serving.answers.tools import ToolFields
from pocketllm.errors import RequestError

MAX_CHOICES = 16
"""Most `n` of one prompt."""
MAX_PROMPTS = 128
"""Most prompts of one completions body, and most choices over all of them."""
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT = 256
MAX_ID_DIGITS = 18
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""

INERT = frozenset({"user", "store", "metadata", "service_tier"})

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

NULL_IS_EMPTY = BeforeValidator(lambda value: [] if value is None else value)
RENDER_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {"annotations": ([],)}


def same(value: Any, other: Any) -> bool:
    """Equal, where a boolean is never a number."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def check_extras(extras: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], inert: frozenset[str]) -> None:
    """Raise ValueError for the first field that asks for something nobody here does."""
    for name, value in extras.items():
        if value is None or name in inert or any(same(value, one) for one in neutral.get(name, ())):
            continue
        if name in neutral:
            raise ValueError(f"field {name[:100]!r} is not supported with this value")
        raise ValueError(f"field {name[:100]!r} is not supported")


def as_texts(value: Any) -> Any:
    """A lone text as a list of one; null as an empty list. ValueError for what is neither, nor a list."""
    if not isinstance(value, str | list | None):
        raise ValueError("must be a text or a list of texts")
    return [value] if isinstance(value, str) else value or []


def as_bias(value: Any) -> Any:
    """Keys of an object, which JSON can only spell as texts, as token ids; ValueError for one that is no number."""
    if not isinstance(value, dict):
        return value
    wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS)]
    if wrong:
        raise ValueError(f"key {wrong[0][:100]!r} is not a token id")
    found = {int(key): bias for key, bias in value.items()}
    if len(found) != len(value):
        raise ValueError("names a token id twice")
    return found


def is_token_id(value: Any) -> bool:
    """An integer that is not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_prompts(value: Any) -> Any:
    """A text, a list of token ids, or a list of either, as a list of prompts; ValueError for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    if not value:
        raise ValueError("is empty")
    if all(is_token_id(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, the limit is {MAX_PROMPTS}")
    for number, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and all(is_token_id(one) for one in item)):
            raise ValueError(f"item {number} is neither a text nor a list of token ids")
    return value


def as_text(value: Any) -> Any:
    """Message content as one text: a list of text parts is joined by line ends; ValueError names a bad part."""
    if not isinstance(value, list):
        return value
    return "\n".join(part_text(number, part) for number, part in enumerate(value))


def part_text(number: int, part: Any) -> str:
    """The text of one content part."""
    if not isinstance(part, dict):
        raise ValueError(f"part {number} must be an object with a type")
    kind = part.get("type")
    if kind != "text":
        raise ValueError(f"part {number} has type {str(kind)[:100]!r}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"part {number} of type 'text' needs a text")
    extra = sorted(name for name, value in part.items() if name not in ("type", "text") and value is not None)
    if extra:
        raise ValueError(f"part {number}: field {extra[0][:100]!r} is not supported")
    return str(part["text"])


class Strict(BaseModel):
    """No number for a text, no boolean for a number, nothing that is not finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream says beside its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def refuse_extras(self) -> "StreamOptions":
        check_extras(self.model_extra or {}, {"include_obfuscation": (False,)}, frozenset())
        return self


class Message(Strict):
    """One message of a conversation; `developer` is OpenAI's newer word for `system` and is treated as it.

    Only the assistant may say nothing, having called tools. Its earlier thought goes to templates that show it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: Annotated[str | None, BeforeValidator(as_text)] = Field(None, validate_default=True)

    @field_validator("tool_calls")
    @classmethod
    def check_calls(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Each must name its function; arguments are read where the template is."""
        for number, call in enumerate(value or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"call {number} must have a function with a name")
        return value

    @field_validator("content")
    @classmethod
    def check_content(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Only calls may stand in the place of a text."""
        if value is None and not (info.data.get("role") == "assistant" and info.data.get("tool_calls")):
            raise ValueError("is missing: a message needs a text, or the assistant's tool calls")
        return value

    @model_validator(mode="after")
    def check_message(self) -> "Message":
        check_extras(self.model_extra or {}, NEUTRAL_IN_MESSAGE, frozenset())
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning):
            raise ValueError("tool_calls and reasoning_content are the assistant's")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is for messages of the role 'tool'")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The message as a template reads it."""
        more = {
            "name": self.name,
            "tool_calls": self.tool_calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        values = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return values | {name: value for name, value in more.items() if value is not None}


class GenerationBody(StructuredFields, Strict):
    """Fields of both endpoints; null means the default everywhere."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(as_bias)] = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(as_texts)] = []
    stop_token_ids: Annotated[list[int], NULL_IS_EMPTY] = []
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None

    @model_validator(mode="after")
    def check_whole(self) -> "GenerationBody":
        check_extras(self.model_extra or {}, NEUTRAL, INERT)
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n={clipped(self.n)} must be between 1 and {MAX_CHOICES}")
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_CACHE_SALT:
            raise ValueError(f"cache_salt must have 1 to {MAX_CACHE_SALT} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, the limit is {MAX_STOP_TOKEN_IDS}"
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not for stream=true: ask without a stream, or for echo and logprobs")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk tells how many tokens there are by then, as vLLM's can."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to compute with each token of the prompt; None: nothing."""
        return self.prompt_logprobs


class ChatBody(ToolFields, GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def check_chat(self) -> "ChatBody":
        if not self.messages:
            raise ValueError("messages is empty")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise ValueError(f"max_completion_tokens={clipped(self.max_completion_tokens)} must be at least 1")
        if self.top_logprobs is not None and not (self.logprobs and 0 <= self.top_logprobs <= MAX_LOGPROBS):
            raise ValueError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, and needs logprobs=true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        taken = RENDER_ARGUMENTS.intersection(self.chat_template_kwargs or {})
        if taken:
            raise ValueError(f"chat_template_kwargs cannot hold {min(taken)!r}: the request has a field for it")
        return self

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables for the template; one that it does not read changes nothing."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(as_prompts)]
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def check_completion(self) -> "CompletionBody":
        total = len(self.prompt) * self.num_choices
        if total > MAX_PROMPTS:
            raise ValueError(f"n times the number of prompts is {total}, the limit is {MAX_PROMPTS}")
        return self

    @property
    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo:
            return self.prompt_logprobs
        wanted = [count for count in (self.prompt_logprobs, self.logprobs) if count is not None]
        # without a token to draw, the prompt is still computed: its usage is real, and what is wrong with it is found
        return max(wanted) if wanted else 0 if self.max_tokens == 0 else None


B = TypeVar("B", bound=BaseModel)


def validate(kind: type[B], document: Mapping[str, Any]) -> B:
    """A body as its model; raises RequestError naming the first field that is wrong."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    place = spelled_place(errors[0]["loc"])
    # a field of several types has an error for each of them
    found = [problem["msg"] for problem in errors if spelled_place(problem["loc"]) == place]
    message = " or ".join(text if text is found[0] else text.removeprefix("Input should be ") for text in found)
    message = message.removeprefix("Value error, ").split(" or instance of ")[0]
    if not place:
        # our own whole-body checks begin with the field's name, possibly quoted
        word = message.removeprefix("field ").split()[0].split("=")[0].strip("'\"")
        raise RequestError(message, param=word[:100] if word.isidentifier() else None)
    raise RequestError(f"{place}: {message}", param=place)


def spelled_place(place: tuple[int | str, ...]) -> str:
    """A location as one would write it in code: messages[0].content; pydantic's names of a union's types left out."""
    text = ""
    for part in place:
        if isinstance(part, str) and (part == "str" or part.endswith("]")):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")[:200]


def clipped(value: int) -> str:
    """A number as text, unless it is absurdly long."""
    return str(value) if abs(value) < 10**18 else "(a very large number)"
