"""How long calls take: many as one launch where the backend's probe can do that, otherwise one after another."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from pocketllm.bench.probes.cases import Case
from pocketllm.engine.backends.api.backend import Backend, Calls, Unit

STAMP_S = 0.5e-3
"""Calls between two stamps take about this long together, so that reading the clock costs nothing."""
LAUNCH_S = 0.25e-3
"""A launch takes no less, so that its beginning costs nothing."""
MOST_CALLS = 1024
"""In one launch."""


class CallByCall:
    """The host's calls in turn, until all of them have finished; see `api.backend.Unit`."""

    def __init__(self, calls: Calls, synchronize: Callable[[], None]) -> None:
        self._calls = calls
        self._synchronize = synchronize
        self.count = 1
        """Calls in `seconds`."""
        self._after(2)  # the first do not count
        while (took_s := self.seconds()) < STAMP_S / 2:
            self.count *= 4
        self.count = max(1, round(self.count * STAMP_S / took_s))

    def seconds(self) -> float:
        """By the host's clock."""
        return self._after(self.count)

    def _after(self, count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            self._calls[number % len(self._calls)]()
        self._synchronize()
        return time.perf_counter() - start


class Launch:
    """Calls that are timed together."""

    def __init__(self, backend: Backend, calls: Calls, reads_back: bool = False) -> None:
        """reads_back: whether a call ends on the host, so that none is part of a launch."""
        self.how = "call by call"
        """`captured`, or that calls were timed one after another, and why."""
        unit: tuple[Unit, int] | None = None
        if backend.probe is not None:
            try:
                unit = None if reads_back else sized(backend.probe.together, calls)
                self.how = self.how if reads_back else "captured"
            except RuntimeError as error:
                self.how = f"{self.how}: {str(error).partition(chr(10))[0]}"
        self._unit, self.count = unit or one_by_one(backend, calls, reads_back)

    def seconds(self) -> float:
        """All of them, once."""
        return self._unit.seconds()

    def call_s(self) -> float:
        """One of them."""
        return self.seconds() / self.count


def one_by_one(backend: Backend, calls: Calls, reads_back: bool) -> tuple[Unit, int]:
    """Calls in turn, each finished, and how many."""
    finish = None if backend.probe is None or reads_back else backend.probe.finish
    if finish is not None:
        calls = [partial(lambda call, done: done(call()), call, finish) for call in calls]
    unit = CallByCall(calls, backend.ops.synchronize)
    return unit, unit.count


def sized(together: Callable[[Calls], Unit], calls: Calls) -> tuple[Unit, int]:
    """Calls in turn as one launch that takes LAUNCH_S or longer, and how many."""
    unit = together(calls)
    unit.seconds()  # the first does not count
    most = max(1, MOST_CALLS // len(calls))
    again = min(most, math.ceil(LAUNCH_S / max(unit.seconds(), 1e-9)))
    return (unit, len(calls)) if again == 1 else (together([*calls] * again), len(calls) * again)


def beside(own: Launch, peer: Launch, rounds: int) -> tuple[float, float]:
    """Seconds of a call of each, in turn, so that both meet the same machine: the medians."""
    both = [(own.call_s(), peer.call_s()) for _ in range(rounds)]
    middle = rounds // 2
    return sorted(own_s for own_s, _ in both)[middle], sorted(peer_s for _, peer_s in both)[middle]


def launches(backend: Backend, cases: Sequence[Case]) -> dict[str, Launch]:
    """Each case's calls, by its name."""
    return {case.name: Launch(backend, case.calls, case.reads_back) for case in cases}
