"""From the engine's thread to the server's loop: how often it is woken, and that nothing is lost or overtaken."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, RequestTimes, TokenEvent
from pocketllm.engine.serving.transport.bridge import Postbox


class Calls:
    """A loop that notes its wakes, or has closed."""

    def __init__(self, is_closed: bool = False) -> None:
        self.wakes: list[Callable[[], None]] = []
        self._is_closed = is_closed

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        self.wakes.append(callback)


class Taker:
    """In place of a generation."""

    def __init__(self, is_streamed: bool = True) -> None:
        self.is_streamed = is_streamed
        self.taken: list[tuple[int, Event]] = []

    def take(self, index: int, event: Event) -> None:
        self.taken.append((index, event))


def token(number: int) -> TokenEvent:
    return TokenEvent("r", number, str(number), None, 0.0)


END = FinishEvent("r", FinishReason.LENGTH, "", 1, 1, 0, RequestTimes(), 0)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def postbox(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Postbox:
    return attended(calls, monkeypatch)


def attended(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Postbox:
    monkeypatch.setattr(
        "pocketllm.engine.serving.transport.bridge.asyncio", SimpleNamespace(get_running_loop=lambda: calls)
    )
    postbox = Postbox()
    postbox.attend()
    return postbox


def test_a_step_wakes_once_for_all_its_streams_and_only_when_it_is_done(postbox: Postbox, calls: Calls) -> None:
    takers = [Taker() for _ in range(8)]
    sinks: list[Any] = [postbox.sink(taker, 3) for taker in takers]  # type: ignore[arg-type]  # in its place
    for number, sink in enumerate(sinks):
        sink(token(number))

    assert calls.wakes == []
    postbox.flush()
    postbox.flush()
    [wake] = calls.wakes
    wake()
    assert [taker.taken for taker in takers] == [[(3, token(number))] for number in range(8)]


def test_steps_that_come_before_the_loop_has_looked_add_no_wake_and_are_delivered_with_the_first(
    postbox: Postbox, calls: Calls
) -> None:
    taker = Taker()
    sink = postbox.sink(taker, 0)  # type: ignore[arg-type]  # in its place
    for number in range(5):
        sink(token(number))
        postbox.flush()

    [wake] = calls.wakes
    wake()
    assert [event for _, event in taker.taken] == [token(number) for number in range(5)]
    sink(token(5))
    postbox.flush()
    assert len(calls.wakes) == 2


def test_an_answer_that_is_not_streamed_wakes_at_its_end_alone(postbox: Postbox, calls: Calls) -> None:
    sink = postbox.sink(Taker(is_streamed=False), 0)  # type: ignore[arg-type]  # in its place
    sink(token(1))
    postbox.flush()

    assert calls.wakes == []
    sink(END)
    postbox.flush()
    assert len(calls.wakes) == 1


def test_a_loop_that_has_closed_is_no_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    postbox = attended(Calls(is_closed=True), monkeypatch)
    taker = Taker()
    postbox.sink(taker, 0)(END)  # type: ignore[arg-type]  # in its place
    postbox.flush()
    postbox.deliver()

    assert taker.taken == []
