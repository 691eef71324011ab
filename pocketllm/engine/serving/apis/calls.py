"""One generation call under any of its addresses: how a body is read, and who writes the answer."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pocketllm.engine.lifecycle.request import FinishEvent
from pocketllm.engine.serving.apis.messages import MessageWriter
from pocketllm.engine.serving.apis.messages_body import MessagesBody
from pocketllm.engine.serving.apis.responses import ResponseWriter
from pocketllm.engine.serving.apis.responses_body import ResponsesBody
from pocketllm.engine.serving.failures import Failure, RefusedError
from pocketllm.engine.serving.prompts import Choice, chat_choices, completion_choices
from pocketllm.engine.serving.protocol import ChatBody, CompletionBody, GenerationBody, validate
from pocketllm.engine.serving.settings import ServedEngine
from pocketllm.engine.serving.stream import Chunks, Reply, Usage, collect, event_bytes
from pocketllm.engine.serving.transport.bridge import Generation


class Writer(Protocol):
    """Writes a chat answer of one choice in another API's words."""

    def begin(self) -> Iterator[bytes]: ...

    def feed(self, choice: dict[str, Any]) -> Iterator[bytes]: ...

    def finish(self, reason: str, stop: str | None, usage: Usage) -> Iterator[bytes]: ...

    def fail(self, failure: Failure) -> bytes: ...

    def document(self, reason: str, stop: str | None, usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Call:
    """A body as it was read. `make_writer` (of the model's name and the choices) is None where OpenAI's own chat or
    completions form is asked for."""

    body: GenerationBody
    make_writer: Callable[[str, list[Choice]], Writer] | None = None

    def choices(self, engine: ServedEngine) -> list[Choice]:
        """What it asks of the engine. Raises RequestError."""
        if isinstance(self.body, ChatBody):
            return chat_choices(engine, self.body)
        assert isinstance(self.body, CompletionBody)
        return completion_choices(engine, self.body)


def read_responses(document: Mapping[str, Any]) -> Call:
    """POST /v1/responses. Raises RequestError."""
    body = validate(ResponsesBody, document)
    return Call(body.chat(), lambda model, choices: ResponseWriter(body, model))


def read_messages(document: Mapping[str, Any]) -> Call:
    """POST /v1/messages. Raises RequestError."""
    body = validate(MessagesBody, document)
    return Call(body.chat(), lambda model, choices: MessageWriter(model, len(choices[0].prompt_token_ids)))


READERS: Mapping[str, Callable[[Mapping[str, Any]], Call]] = {
    "/v1/chat/completions": lambda document: Call(validate(ChatBody, document)),
    "/v1/completions": lambda document: Call(validate(CompletionBody, document)),
    "/v1/responses": read_responses,
    "/v1/messages": read_messages,
}
"""Address → how its body is read."""


async def whole(generation: Generation, reply: Reply, writer: Writer | None) -> dict[str, Any]:
    """The answer as one document. Raises RefusedError when the engine ended a request."""
    if writer is None:
        return await collect(generation, reply)
    chunks, document = Chunks(generation, reply), dict[str, Any]()
    async for choice, event in told(generation, chunks):
        for _ in writer.feed(choice):
            pass
        if event is not None:
            document = writer.document(choice["finish_reason"], event.stop_string, chunks.usage)
    return document


def streamed(
    generation: Generation, reply: Reply, writer: Writer | None, on_crash: Callable[[Exception], Failure]
) -> AsyncIterator[bytes]:
    """The answer as server-sent events; what goes wrong once they have begun is told in band."""
    if writer is None:
        return event_bytes(generation, reply, on_crash)
    return written(generation, reply, writer, on_crash)


async def written(
    generation: Generation, reply: Reply, writer: Writer, on_crash: Callable[[Exception], Failure]
) -> AsyncIterator[bytes]:
    """The events of a writer; none after the call was abandoned."""
    chunks = Chunks(generation, reply)
    for part in writer.begin():
        yield part
    try:
        async for choice, event in told(generation, chunks):
            for part in writer.feed(choice):
                yield part
            if event is not None:
                for part in writer.finish(choice["finish_reason"], event.stop_string, chunks.usage):
                    yield part
    except RefusedError as refused:
        yield writer.fail(refused.failure)
    except Exception as error:
        yield writer.fail(on_crash(error))


async def told(generation: Generation, chunks: Chunks) -> AsyncIterator[tuple[dict[str, Any], FinishEvent | None]]:
    """The choice of each chat chunk, in order, and with the last one the event that ended it."""
    async for index, event in generation.events():
        for chunk in chunks.documents(index, event):
            [choice] = chunk["choices"]
            is_last = choice["finish_reason"] is not None
            yield choice, event if is_last and isinstance(event, FinishEvent) else None
