"""The Python API: `LLM` and `AsyncLLM`. One prompt or many go through the one scheduler, as the server's do."""

import asyncio
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.answers import Sink
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import Event, FinishEvent, Request
from pocketllm.engine.lifecycle.result import GenerationResult
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.llm.inputs import (
    GivenParams,
    Inputs,
    Message,
    Prompt,
    many_conversations,
    model_text,
    refuse_closed,
)
from pocketllm.engine.load import Engine, Progress, load_engine
from pocketllm.engine.options import resolve_options
from pocketllm.errors import QueueFullError

_Letter = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Event]", Event]


class LLM:
    """A loaded model, used from one process without a server.

        with LLM(model="smollm2-135m") as llm:
            [result] = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))

    options: any field of EngineOptions. Methods may be called from several threads; their requests share the steps.
    Ctrl-C takes effect between two steps, and cancels what the interrupted call had submitted.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
    ) -> None:
        self._start(load_engine(resolve_options({"model": model_text(model), **options}), progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """Over an engine that is loaded already; closing this closes it."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self._inputs = Inputs(engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GivenParams = None,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt; results in the order of the prompts, which share steps as the scheduler lets them.

        on_event: called with each event between steps. Raises RequestError, before anything runs, when one of the
        prompts cannot be served.
        """
        requests = self._inputs.requests(prompts, params)
        collectors = self._inputs.collectors(requests)
        with closing(self._events(requests)) as events:
            for event in events:
                collectors[event.request_id].take(event)
                if on_event is not None:
                    on_event(event)
        return [collector.result() for collector in collectors.values()]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: GivenParams = None,
    ) -> list[GenerationResult]:
        """Answer a conversation, or each of several; the token ids are the server's."""
        return self.generate([self.chat_token_ids(one) for one in many_conversations(messages)], params)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as the token ids that `generate` would run."""
        return self._inputs.token_ids(prompt)

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as the token ids that `chat` would run."""
        return self._inputs.chat_token_ids(messages)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Generator[Event, None, None]:
        """Events of one prompt as they happen; the last is its FinishEvent. Leaving the iterator cancels it."""
        request = self._inputs.request(prompt, params, request_id)
        self.engine.loop.check(request)
        return self._events([request])

    def prompt_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits at every position of a prompt: [prompt tokens, vocab]; row i tells what follows token i."""
        request = self._inputs.request(prompt, SamplingParams(), wants_prompt_logits=True)
        for event in self._events([request]):
            if isinstance(event, FinishEvent):
                return finished_logits(event)
        raise AssertionError("the terminal event did not come")

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step, from any thread or a signal handler; False when it is not running."""
        return self.engine.loop.cancel(request_id)

    def cancel_all(self) -> None:
        """End every request before the next step, from any thread or a signal handler."""
        self.engine.loop.cancel_all()

    def close(self) -> None:
        """Cancel what runs and free the model; every later call but this one and cancelling is refused."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        refuse_closed(self.engine)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Submit as the queue takes them, and yield events until each request has had its last."""
        loop, events = self.engine.loop, SimpleQueue[Event]()
        ahead, in_flight = list(reversed(requests)), set[str]()
        try:
            while ahead or in_flight:
                submit_some(self.engine, ahead, in_flight, events.put)
                event = next_event(loop, events)
                if event is None:
                    continue
                if isinstance(event, FinishEvent):
                    in_flight.discard(event.request_id)
                yield event
        finally:
            for request_id in in_flight:
                loop.cancel(request_id)
            while in_flight:
                event = next_event(loop, events)
                if isinstance(event, FinishEvent):
                    in_flight.discard(event.request_id)


def submit_some(engine: Engine, ahead: list[Request], in_flight: set[str], sink: Sink) -> None:
    """Submit from the end of `ahead` until the queue is full; raises QueueFullError only if nothing of ours runs."""
    while ahead:
        try:
            engine.loop.submit(ahead[-1], sink)
        except QueueFullError:
            refuse_closed(engine)  # or it would say to come back later
            if not in_flight:
                raise
            return
        in_flight.add(ahead.pop().request_id)


def next_event(loop: EngineLoop, events: "SimpleQueue[Event]") -> Event | None:
    """The next event; when there is none, a step is taken, or waited for if the loop has its own thread."""
    if events.empty() and not loop.is_running:
        step_uninterrupted(loop)
    try:
        return events.get(timeout=0.1) if loop.is_running else events.get_nowait()
    except Empty:
        return None


def step_uninterrupted(loop: EngineLoop) -> None:
    """One step; ctrl-C during it is handled right after it, a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        loop.step()
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
        loop.step()
        return
    pressed: list[FrameType | None] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pressed.append(frame)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        loop.step()
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        previous(signal.SIGINT, pressed[0])


def finished_logits(event: FinishEvent) -> npt.NDArray[np.float32]:
    """Prompt logits of a request that was scored; raises when it did not get that far."""
    if event.prompt_logits is None:
        raise RuntimeError(f"scoring ended early ({event.reason.value}): {event.error or 'cancelled'}")
    return event.prompt_logits


class AsyncLLM:
    """`LLM` for asyncio: the loop has a thread of its own, and requests of many tasks share its steps.

    Cancelling a task that awaits a result, or leaving a stream, cancels its request.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any
    ) -> None:
        self._start(load_engine(resolve_options({"model": model_text(model), **options}), progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> "AsyncLLM":
        """Over an engine that is loaded already; closing this closes it."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self._inputs = Inputs(engine)
        self._mail: deque[_Letter] = deque()
        refuse_closed(engine)  # its loop would start again, over weights that are gone
        engine.loop.on_step_end(self._deliver)
        engine.loop.start()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GivenParams = None,
    ) -> list[GenerationResult]:
        """Continue each prompt; results in the order of the prompts."""
        requests = self._inputs.requests(prompts, params)
        collectors = self._inputs.collectors(requests)
        async with aclosing(self._events(requests)) as events:
            async for event in events:
                collectors[event.request_id].take(event)
        return [collector.result() for collector in collectors.values()]

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: GivenParams = None,
    ) -> list[GenerationResult]:
        """Answer a conversation, or each of several."""
        return await self.generate([self.chat_token_ids(one) for one in many_conversations(messages)], params)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as the token ids that `generate` would run."""
        return self._inputs.token_ids(prompt)

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as the token ids that `chat` would run."""
        return self._inputs.chat_token_ids(messages)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events of one prompt as they happen; the last is its FinishEvent. Leaving the iterator cancels it."""
        request = self._inputs.request(prompt, params, request_id)
        self.engine.loop.check(request)
        return self._events([request])

    async def prompt_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits at every position of a prompt: [prompt tokens, vocab]."""
        request = self._inputs.request(prompt, SamplingParams(), wants_prompt_logits=True)
        async with aclosing(self._events([request])) as events:
            async for event in events:
                if isinstance(event, FinishEvent):
                    return finished_logits(event)
        raise AssertionError("the terminal event did not come")

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step; False when it is not running."""
        return self.engine.loop.cancel(request_id)

    async def close(self) -> None:
        """Cancel what runs and free the model; every later call but this one and cancelling is refused."""
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> "AsyncLLM":
        refuse_closed(self.engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(self, requests: list[Request]) -> AsyncGenerator[Event, None]:
        loop, here, events = self.engine.loop, asyncio.get_running_loop(), asyncio.Queue[Event]()

        def sink(event: Event) -> None:
            if here.is_closed():
                raise RuntimeError("the asyncio loop that waited for this event has closed")
            self._mail.append((here, events, event))

        ahead, in_flight = list(reversed(requests)), set[str]()
        try:
            while ahead or in_flight:
                submit_some(self.engine, ahead, in_flight, sink)
                event = await events.get()
                if isinstance(event, FinishEvent):
                    in_flight.discard(event.request_id)
                yield event
        finally:
            for request_id in in_flight:
                loop.cancel(request_id)

    def _deliver(self) -> None:
        """On the loop's thread, after each step: wake each asyncio loop once, however many events it gets."""
        batches: dict[asyncio.AbstractEventLoop, list[_Letter]] = {}
        while self._mail:
            letter = self._mail.popleft()
            batches.setdefault(letter[0], []).append(letter)
        for here, letters in batches.items():
            with suppress(RuntimeError):  # it has closed meanwhile: the next event ends the request
                here.call_soon_threadsafe(put_all, letters)


def put_all(letters: Sequence[_Letter]) -> None:
    """Hand events to who waits for them, in order; on their asyncio loop."""
    for _, events, event in letters:
        events.put_nowait(event)
