"""Work beside the event loop, and the memory that it leaves behind."""

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

M_ARENA_MAX = -8
"""glibc's name for the number of heaps, from malloc.h."""
TRIM_S = 1.0
"""From a job's end until its memory is given back: by then its results are gone too, and many jobs cost one trim."""


class Aside:
    """Runs jobs on threads, so that streams keep flowing, and gives back what they freed.

    glibc keeps the heap of a thread as large as it ever was: encoding 300 kB of text leaves 20 to 50 MB in each thread.
    """

    def __init__(self) -> None:
        self._is_due = False

    async def run(self, job: Callable[[], T]) -> T:
        """What a job returns or raises."""
        try:
            return await asyncio.to_thread(job)
        finally:
            self.give_back_soon()

    def give_back_soon(self) -> None:
        """Give back what others have freed, too; called on the event loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        with suppress(RuntimeError):  # the server ends, and its threads have: the system takes everything soon
            asyncio.get_running_loop().run_in_executor(None, give_back)


def share_one_heap() -> None:
    """Let threads that begin from now on have no heaps of their own: `give_back` cannot return the end of those."""
    limit = of_glibc("mallopt")
    if limit is not None:
        limit(M_ARENA_MAX, 1)


def give_back() -> None:
    """Give freed memory back to the system, in about 2 ms; does nothing where the C library has no way to."""
    trim = of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def of_glibc(name: str) -> Callable[..., Any] | None:
    """A function that glibc has; None where another C library has none."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return found
