"""From the engine's thread to asyncio: one HTTP call's requests as one stream of events, without polling."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from pocketllm.engine.lifecycle.request import Event, FinishEvent, Request
from pocketllm.engine.serving.prompts import Choice
from pocketllm.engine.serving.settings import ServedLoop

Observer = Callable[[Event], None]


class Postbox:
    """Carries events from the engine's thread to the server's loop, with one wake a step for all calls together.

    The engine's thread only appends, and flushes when its step is done: it waits for nobody, and nobody is woken while
    it still has tokens to choose.
    """

    def __init__(self) -> None:
        self._mail: deque[tuple[Generation, int, Event]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_due = False
        self._is_signaled = False

    def attend(self) -> None:
        """Deliver on the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def sink(self, generation: "Generation", index: int) -> Callable[[Event], None]:
        """What takes the events of one choice, on the engine's thread."""
        append, is_streamed = self._mail.append, generation.is_streamed

        def sink(event: Event) -> None:
            append((generation, index, event))
            if is_streamed or isinstance(event, FinishEvent):
                self._is_due = True

        return sink

    def flush(self) -> None:
        """Wake the server's loop if somebody waits for what has come; called on the engine's thread after a step."""
        if not self._is_due or self._is_signaled or self._loop is None:
            return
        self._is_due, self._is_signaled = False, True
        try:
            self._loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:
            # the server's loop has closed under requests that outlived it: nobody reads any more
            self._mail.clear()

    def deliver(self) -> None:
        """Hand every event to its call; on the server's loop."""
        # cleared before the mail is read: an event that comes in between signals again rather than being missed
        self._is_signaled = False
        mail = self._mail
        while mail:
            generation, index, event = mail.popleft()
            generation.take(index, event)


class Generation:
    """All requests of one HTTP call, submitted together or not at all.

    Where the answer is not streamed only terminal events wake its reader. `abandon` is how a call ends early: its
    requests are cancelled and `events` returns.
    """

    def __init__(
        self,
        generation_id: str,
        choices: Sequence[Choice],
        engine_loop: ServedLoop,
        postbox: Postbox,
        is_streamed: bool,
        request_id: str = "",
    ) -> None:
        self.id = generation_id
        self.request_id = request_id
        self.choices = tuple(choices)
        self.is_abandoned = False
        self.is_streamed = is_streamed
        self.requests: tuple[Request, ...] = ()
        self.ends: list[FinishEvent] = []
        self._engine_loop = engine_loop
        self._postbox = postbox
        self._inbox: deque[tuple[int, Event]] = deque()
        self._woken = asyncio.Event()
        self._open: dict[int, str] = {}
        self._observers: dict[int, Observer] = {}

    def submit(self, observe: Callable[[Request], Observer]) -> None:
        """Hand every choice to the engine; on a refusal those already handed over are cancelled and it is raised.

        `observe` makes, for each request, what sees its events as they are delivered.
        """
        requests: list[Request] = []
        for choice in self.choices:
            requests.append(self._request(choice, requests))
            self._engine_loop.check(requests[-1])  # what can never be served is refused before its neighbors begin
        self.requests = tuple(requests)
        self._postbox.attend()
        for choice, request in zip(self.choices, requests, strict=True):
            self._open[choice.index] = request.request_id
            self._observers[choice.index] = observe(request)
            try:
                self._engine_loop.submit(request, self._postbox.sink(self, choice.index))
            except BaseException:
                del self._open[choice.index]
                self.abandon()
                raise

    def _request(self, choice: Choice, earlier: Sequence[Request]) -> Request:
        return Request(
            f"{self.id}-{choice.index}",
            choice.prompt_token_ids,
            choice.params,
            cache_salt=choice.cache_salt,
            scored_by=None if choice.scored_by is None else earlier[choice.scored_by],
        )

    def take(self, index: int, event: Event) -> None:
        """An event of choice `index` has been delivered."""
        self._observers[index](event)
        self._inbox.append((index, event))
        if isinstance(event, FinishEvent):
            self.ends.append(event)
        if self.is_streamed or isinstance(event, FinishEvent):
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
