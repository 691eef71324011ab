"""From the engine's thread to asyncio: one HTTP call's requests as one stream of events, without polling."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from pocketllm.engine.lifecycle.request import Event, FinishEvent, Request
from pocketllm.engine.serving.prompts import Choice
from pocketllm.engine.serving.settings import ServedLoop

Observer = Callable[[Event], None]


class Generation:
    """All requests of one HTTP call, submitted together or not at all.

    The engine's thread appends an event and wakes the server's loop at most once until it has looked; when the answer
    is not streamed it wakes it for terminal events alone. `abandon` is how a call ends early: its requests are
    cancelled and `events` returns.
    """

    def __init__(
        self, generation_id: str, choices: Sequence[Choice], engine_loop: ServedLoop, is_streamed: bool
    ) -> None:
        self.id = generation_id
        self.choices = tuple(choices)
        self.is_abandoned = False
        self._engine_loop = engine_loop
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[int, Event]] = deque()
        self._woken = asyncio.Event()
        self._is_signaled = False
        self._is_streamed = is_streamed
        self._open: dict[int, str] = {}

    def submit(self, observe: Callable[[Request], Observer]) -> None:
        """Hand every choice to the engine; on a refusal those already handed over are cancelled and it is raised.

        `observe` makes, for each request, what sees its events on the engine's thread.
        """
        requests = [
            Request(f"{self.id}-{choice.index}", choice.prompt_token_ids, choice.params, cache_salt=choice.cache_salt)
            for choice in self.choices
        ]
        for request in requests:
            self._engine_loop.check(request)  # what can never be served is refused before its neighbors begin
        for choice, request in zip(self.choices, requests, strict=True):
            self._open[choice.index] = request.request_id
            try:
                self._engine_loop.submit(request, self._sink(choice.index, observe(request)))
            except BaseException:
                del self._open[choice.index]
                self.abandon()
                raise

    def _sink(self, index: int, observe: Observer) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            observe(event)
            self._inbox.append((index, event))
            is_due = self._is_streamed or isinstance(event, FinishEvent)
            if is_due and not self._is_signaled:
                self._is_signaled = True
                try:
                    self._loop.call_soon_threadsafe(self._wake)
                except RuntimeError:
                    # the server's loop has closed under a request that outlived it: nobody reads any more
                    self.is_abandoned = True

        return sink

    def _wake(self) -> None:
        # cleared before the inbox is read: an event that comes in between signals again rather than being missed
        self._is_signaled = False
        self._woken.set()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice index, event) as they happen, until every choice has ended or the call is abandoned."""
        while self._open and not self.is_abandoned:
            while self._inbox and not self.is_abandoned:
                index, event = self._inbox.popleft()
                if isinstance(event, FinishEvent):
                    self._open.pop(index, None)
                yield index, event
            self._woken.clear()
            if self._open and not self._inbox and not self.is_abandoned:
                await self._woken.wait()

    def cancel(self) -> None:
        """Ask the engine to end what is still running; its terminal events arrive as usual."""
        for request_id in list(self._open.values()):
            self._engine_loop.cancel(request_id)

    def abandon(self) -> None:
        """Nobody reads any more: end what is running and let `events` return. Harmless when all is done."""
        self.is_abandoned = True
        self.cancel()
        self._open.clear()
        self._woken.set()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectWatch:
    """While entered, a client that goes away abandons the generation; leaving abandons whatever was not finished."""

    def __init__(self, generation: Generation, receive: Receive) -> None:
        self._generation = generation
        self._receive = receive

    async def __aenter__(self) -> Generation:
        self._task = asyncio.create_task(wait_for_disconnect(self._receive))
        self._task.add_done_callback(self._client_gone)
        return self._generation

    def _client_gone(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._generation.abandon()

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._generation.abandon()
