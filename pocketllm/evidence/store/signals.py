"""Signals that end a program wait while a record is written: what was paid for is never left half done."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until this ends; the first that came is then obeyed as it would have been,
    unless an error ends the work first: that is told.

    Signals reach the main thread alone: in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    holding = True

    def remember(number: int, frame: FrameType | None) -> None:
        if holding:
            came.append(number)
        else:  # it came while handlers are put back, and this one still stood: nothing is lost
            signal.signal(number, held[number])
            signal.raise_signal(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    # what is ignored stays ignored, and a handler that is not Python's (None) could not be put back
    held: dict[int, Any] = {
        number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)
    }
    try:
        for number in held:
            signal.signal(number, remember)  # the other signal may be obeyed meanwhile, and raise
        yield
    finally:
        holding = False
        put_back(held)
    if came:
        signal.raise_signal(came[0])


def put_back(handlers: Mapping[int, Any]) -> None:
    """Every handler back, also where one of them is obeyed before the others are: what it raises is passed on.

    A signal mask would not do: it is one thread's, and a signal that another thread takes is obeyed in the main one.
    """
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    except BaseException:
        put_back(handlers)
        raise
