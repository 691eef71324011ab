"""From events to what a client reads: one document, or server-sent events that add up to the same."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.serving.answers.deltas import ChoiceDeltas, message
from pocketllm.engine.serving.answers.logprobs import (
    OffsetCounter,
    Speller,
    TokenReport,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_reports,
    report,
)
from pocketllm.engine.serving.failures import Failure, RefusedError, engine_failure, unanswerable, unavailable
from pocketllm.engine.serving.protocol import ChatBody, GenerationBody
from pocketllm.engine.serving.transport.bridge import DisconnectWatch, Generation

DONE = b"data: [DONE]\n\n"
MARK = "\0the text of a token\0"
"""Stands for a text in a chunk that is taken apart around it; names and ids before it hold no NUL."""


@dataclass
class Piece:
    """A stretch of one answer: in a stream one event's worth, otherwise the whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)


class Reply:
    """The shape of one call's answer: ids, model name, and how a choice is written.

    Raises RefusedError from `piece` and `finish_reason` when the engine, not the client, ended a request.
    """

    def __init__(self, generation: Generation, body: GenerationBody, model: str, speller: Speller) -> None:
        self.id = generation.id
        self._generation = generation
        self.is_chat = isinstance(body, ChatBody)
        self.body = body
        self.with_ids = bool(body.return_token_ids)
        self._model = model
        self._created = int(time.time())
        self._speller = speller
        self._offsets: dict[int, OffsetCounter] = {}
        self._deltas = {
            choice.index: ChoiceDeltas(choice.form) for choice in generation.choices if choice.form is not None
        }

    def is_split(self, index: int) -> bool:
        """Whether the text of choice `index` is more than content."""
        return index in self._deltas

    def deltas(self, index: int, piece: Piece, is_last: bool) -> list[tuple[dict[str, Any], Piece]]:
        """The deltas of a piece, each with what its chunk tells beside it: ids and reports come with the first."""
        if index in self._deltas:
            found = self._deltas[index].push(piece.text, is_last)
        else:
            found = [{"content": piece.text}] if piece.text else []
        if not found and (piece.reports or (piece.token_ids and self.with_ids)):
            found = [{"content": ""}]
        rests = [piece, *(Piece() for _ in found[1:])]
        return list(zip(found, rests, strict=False))

    def message(self, index: int, text: str) -> dict[str, Any]:
        """The whole message of choice `index`."""
        return message([delta for delta, _ in self.deltas(index, Piece(text), is_last=True)])

    def piece(self, index: int, event: Event) -> Piece:
        """What an event adds to choice `index`."""
        piece = Piece()
        if index not in self._offsets:
            self._offsets[index] = OffsetCounter()
            self._echo(index, piece)
        piece.text += event.text
        if isinstance(event, FinishEvent):
            return piece
        piece.token_ids.append(event.token_id)
        if event.logprobs is not None:
            offset = self._offsets[index].advance(self._speller.spell(event.token_id).data)
            piece.reports.append(report(event.token_id, event.logprobs, offset))
        return piece

    def _echo(self, index: int, piece: Piece) -> None:
        """Begin a choice with its prompt, where that was asked for."""
        choice, request = self._generation.choices[index], self._generation.requests[index]
        if choice.echo is None:
            return
        piece.text = choice.echo
        if request.params.logprobs is not None:
            counter = self._offsets[index] = OffsetCounter(self._speller.strips_first_space)
            piece.reports = prompt_reports(request, counter, self._speller)

    @property
    def is_plain(self) -> bool:
        """Whether a chunk of a choice that has begun carries its text and nothing else."""
        return not (self.with_ids or self.body.has_running_usage) and self.body.num_logprobs is None

    def prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """What was asked to be told of the prompt of choice `index`."""
        count = self.body.prompt_logprobs
        return None if count is None else prompt_logprobs(self._generation.requests[index], count, self._speller)

    def finish_reason(self, event: FinishEvent) -> str:
        """OpenAI's word for why a choice ended."""
        match event.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                return str(event.reason.value)
            case FinishReason.CANCELLED:
                raise RefusedError(unavailable("the request was cancelled by the server", "cancelled"))
            case FinishReason.ERROR if event.is_unanswerable:
                raise RefusedError(unanswerable(str(event.error)))
            case FinishReason.ERROR:
                raise RefusedError(engine_failure(self.id))

    def last_reason(self, index: int, reason: str | None) -> str | None:
        """Why choice `index` ended, once its text has been taken apart: a call that was made is what it ended for."""
        has_calls = index in self._deltas and self._deltas[index].has_calls
        return "tool_calls" if has_calls and reason == "stop" else reason

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The `logprobs` value of a choice; null when none were asked for or none are in this piece."""
        if not piece.reports:
            return None
        render = chat_logprobs if self.is_chat else completion_logprobs
        return render(piece.reports, self._speller, self.with_ids)

    def document(self, choices: list[dict[str, Any]], usage: "Usage | None", chunk: bool) -> dict[str, Any]:
        """An answer, or with `chunk` one part of it, around its choices."""
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        if chunk and not self.body.includes_usage and usage is None:
            return head
        return head | {"usage": None if usage is None else usage.as_dict()}


@dataclass
class Usage:
    """Tokens of a whole call; a prompt counts once, however many choices continue it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, event: FinishEvent, is_first_of_prompt: bool) -> None:
        """Count one finished choice."""
        self.completion_tokens += event.num_output_tokens
        if is_first_of_prompt:
            self.prompt_tokens += event.num_prompt_tokens
            self.cached_tokens += event.num_cached_tokens

    def see(self, request: Request, event: Event) -> None:
        """Count what has come of one choice by now."""
        self.prompt_tokens = len(request.prompt_token_ids)
        self.cached_tokens = request.num_cached_tokens
        self.completion_tokens += isinstance(event, TokenEvent)

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def collect(generation: Generation, reply: Reply) -> dict[str, Any]:
    """The answer as one document. Raises RefusedError when the engine ended a request."""
    wholes = [Piece() for _ in generation.choices]
    reasons: dict[int, str] = {}
    usage = Usage()
    async for index, event in generation.events():
        if isinstance(event, FinishEvent):
            reasons[index] = reply.finish_reason(event)
            usage.add(event, index % reply.body.num_choices == 0)
        piece, whole = reply.piece(index, event), wholes[index]
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.reports += piece.reports
    choices = [whole_choice(generation, reply, index, whole, reasons.get(index)) for index, whole in enumerate(wholes)]
    document = reply.document(choices, usage, chunk=False)
    if reply.is_chat and reply.body.prompt_logprobs is not None:
        document["prompt_logprobs"] = reply.prompt_logprobs(0)  # as in vLLM: one prompt, whatever the number of choices
    return document


def whole_choice(generation: Generation, reply: Reply, index: int, whole: Piece, reason: str | None) -> dict[str, Any]:
    """One finished choice of a document."""
    choice: dict[str, Any] = {"index": index, "logprobs": reply.logprobs(whole), "finish_reason": reason}
    if reply.is_chat:
        choice["message"] = reply.message(index, whole.text)
        choice["finish_reason"] = reply.last_reason(index, reason)
    else:
        choice["text"] = whole.text
        if reply.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = reply.prompt_logprobs(index)
    if reply.with_ids:
        choice["token_ids"] = whole.token_ids
        choice["prompt_token_ids"] = list(generation.choices[index].prompt_token_ids)
    return choice


class Chunks:
    """The server-sent events of a streamed answer, in order; every choice opens once and finishes once."""

    def __init__(self, generation: Generation, reply: Reply) -> None:
        self._generation = generation
        self._reply = reply
        self._opened: set[int] = set()
        self.usage = Usage()
        self._running: dict[int, Usage] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, event: Event) -> list[bytes]:
        """What one event becomes: nothing while text is held back and nothing else was asked for."""
        if index in self._frames and isinstance(event, TokenEvent):
            before, after = self._frames[index]
            return [before + json.dumps(event.text).encode("ascii") + after] if event.text else []
        chunks = [as_event(chunk) for chunk in self.documents(index, event)]
        if index in self._opened and self._reply.is_plain and not self._reply.is_split(index):
            self._frames[index] = self._frame(index)
        return chunks

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in every chunk that carries text alone: most of all chunks."""
        chunk = as_event(self._chunk(index, {"content": MARK}, Piece(MARK)))
        before, _, after = chunk.partition(json.dumps(MARK).encode("ascii"))
        return before, after

    def documents(self, index: int, event: Event) -> list[dict[str, Any]]:
        """What one event becomes, before it is written."""
        reply = self._reply
        if reply.body.has_running_usage:
            self._running.setdefault(index, Usage()).see(self._generation.requests[index], event)
        chunks = []
        if reply.is_chat and index not in self._opened:
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, Piece()))
        reason = reply.finish_reason(event) if isinstance(event, FinishEvent) else None
        piece = reply.piece(index, event)
        for delta, told in reply.deltas(index, piece, isinstance(event, FinishEvent)):
            chunks.append(self._chunk(index, delta, told))
        if isinstance(event, FinishEvent):
            self.usage.add(event, index % reply.body.num_choices == 0)
            chunks.append(self._chunk(index, {}, Piece(), reply.last_reason(index, reason)))
        return chunks

    def last(self) -> list[bytes]:
        """The usage chunk, when it was asked for."""
        if not self._reply.body.includes_usage:
            return []
        return [as_event(self._reply.document([], self.usage, chunk=True))]

    def _chunk(self, index: int, delta: dict[str, Any], piece: Piece, reason: str | None = None) -> dict[str, Any]:
        reply = self._reply
        choice: dict[str, Any] = {"index": index, "logprobs": reply.logprobs(piece), "finish_reason": reason}
        choice |= {"delta": delta} if reply.is_chat else {"text": piece.text}
        if reply.with_ids:
            choice["token_ids"] = piece.token_ids
            if index not in self._opened:
                choice["prompt_token_ids"] = list(self._generation.choices[index].prompt_token_ids)
        self._opened.add(index)
        return reply.document([choice], self._running[index] if reply.body.has_running_usage else None, chunk=True)


def as_event(document: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII: naive readers split lines at U+2028 and its kin."""
    return b"data: " + json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


def named_event(name: str, document: dict[str, Any]) -> bytes:
    """One server-sent event that carries its name."""
    return b"event: " + name.encode("ascii") + b"\n" + as_event(document)


async def event_bytes(
    generation: Generation, reply: Reply, on_crash: Callable[[Exception], Failure]
) -> AsyncIterator[bytes]:
    """Every event of the stream, `[DONE]` included; nothing more once the call was abandoned.

    What goes wrong from here on is told in band, because the status has been sent.
    """
    chunks = Chunks(generation, reply)
    try:
        async for index, event in generation.events():
            for chunk in chunks.of(index, event):
                yield chunk
        if generation.is_abandoned:
            return
        for chunk in chunks.last():
            yield chunk
    except RefusedError as refused:
        yield as_event(refused.failure.body())
    except Exception as error:
        yield as_event(on_crash(error).body())
    yield DONE


class EventStream(Response):
    """A stream that ends its requests when the client goes away; one write an event."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with DisconnectWatch(self._generation, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return  # the client has gone; leaving the watch has ended its requests
        finally:
            self._on_end()
