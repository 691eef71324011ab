"""What a user of the Python API gives, read into requests. Each mistake is one RequestError, before anything runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import index
from typing import Any

import numpy as np

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.result import Collector
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.load import Engine
from pocketllm.errors import RequestError

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
GivenParams = SamplingParams | Sequence[SamplingParams] | None

_request_numbers = count(1)


class Inputs:
    """From what a user gives to requests; shared by both APIs. Nothing is read for an engine that is closed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A text through the tokenizer (special tokens added, none parsed), or token ids as they are."""
        refuse_closed(self.engine)
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        return [token_id_of(item) for item in items_of(prompt, no_prompt)]

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation through the checkpoint's chat template: the ids that the server would run."""
        refuse_closed(self.engine)
        conversation = items_of(messages, no_conversation)
        for message in conversation:
            if not isinstance(message, Mapping):
                raise no_conversation(message)
        template = self.engine.chat_template
        if template is None:
            raise RequestError(
                f"{self.engine.model_name} has no chat template: give it a plain prompt", param="messages"
            )
        return self.engine.tokenizer.encode_rendered(template.render(conversation))

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        wants_prompt_logits: bool = False,
    ) -> Request:
        """One request; its id is made up when none is given."""
        token_ids = self.token_ids(prompt)
        params = SamplingParams() if params is None else sampling_of(params)
        request_id = request_id or f"local-{next(_request_numbers)}"
        return Request(request_id, token_ids, params, wants_prompt_logits=wants_prompt_logits)

    def requests(self, prompts: Prompt | Sequence[Prompt], params: GivenParams) -> list[Request]:
        """A request for each prompt, all with the same parameters or each with its own.

        Raises RequestError when one of them can never be served.
        """
        refuse_closed(self.engine)
        items = many(prompts)
        each = params_of_each(params, len(items))
        requests = [self.request(prompt, one) for prompt, one in zip(items, each, strict=True)]
        for request in requests:
            self.engine.loop.check(request)
        return requests

    def collectors(self, requests: Sequence[Request]) -> dict[str, Collector]:
        """One for each request, by its id."""
        return {request.request_id: Collector(request, self.engine.load_s) for request in requests}


def refuse_closed(engine: Engine) -> None:
    """Raise for an engine that has been closed: its weights are gone, and no waiting brings them back."""
    if engine.is_closed:
        raise RequestError("this LLM is closed: make another")


def model_text(model: Any) -> Any:
    """A path as text; the rest as it is, for the options to judge."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) as a list of one; several as they are."""
    if isinstance(prompts, str):
        return [prompts]
    items = items_of(prompts, no_prompt)  # before anything looks inside: a generator gives its items once
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]
    return items


def items_of(given: Any, refusal: Callable[[object], RequestError]) -> list[Any]:
    """What a list holds, or any other thing that gives its items one by one."""
    # a mapping would give its keys, bytes would give numbers
    if isinstance(given, Mapping | str | bytes | bytearray | memoryview):
        raise refusal(given)
    try:
        items = iter(given)
    except TypeError as error:
        raise refusal(given) from error
    return list(items)  # outside: what a generator raises is its own


def no_prompt(given: object) -> RequestError:
    """For what is neither a text nor token ids."""
    kind = type(given).__name__
    hint = ": decode bytes to a text first" if isinstance(given, bytes | bytearray | memoryview) else ""
    return RequestError(
        f"a prompt is a text or a list of token ids, several are a list of them, not {kind}{hint}", param="prompt"
    )


def token_id_of(item: Any) -> int:
    """A whole number; Python would let True pass for one."""
    try:
        if not isinstance(item, bool):
            return index(item)
    except TypeError:
        pass
    raise RequestError(f"a token id is a whole number, not {type(item).__name__}", param="prompt")


def many_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a list of one; several as they are."""
    items = items_of(messages, no_conversation)
    return [items] if all(isinstance(item, Mapping) for item in items) else items


def no_conversation(given: object) -> RequestError:
    """For what is no list of mappings."""
    return RequestError(
        "a conversation is a list of messages, each a mapping such as {'role': 'user', 'content': 'Hello'}, "
        f"not {type(given).__name__}",
        param="messages",
    )


def params_of_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """The same for all prompts, or one for each of them."""
    if isinstance(params, SamplingParams) or params is None:
        return [params or SamplingParams()] * num_prompts
    each = [sampling_of(one) for one in items_of(params, no_sampling)]
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts and {len(each)} sampling parameters", param="params")
    return each


def sampling_of(params: Any) -> SamplingParams:
    """As it is, if it is one: an empty mapping must not pass for the defaults."""
    if not isinstance(params, SamplingParams):
        raise no_sampling(params)
    return params


def no_sampling(given: object) -> RequestError:
    """For what is no SamplingParams."""
    return RequestError(
        f"how to sample is told by SamplingParams: give SamplingParams(...), not {type(given).__name__}", param="params"
    )
