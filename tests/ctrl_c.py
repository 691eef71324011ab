"""Ctrl-C pressed at a chosen moment."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ctrl_c_heard() -> Iterator[None]:
    """Python's own handler: a test run that a shell put in the background was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_while(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, with Ctrl-C pressed as it begins."""

    def disturbed(*given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return work(*given)

    return disturbed
