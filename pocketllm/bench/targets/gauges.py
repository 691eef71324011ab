"""What a server says of itself under /metrics (or llama-server's /slots) while a load runs on it.

It is asked before and after; where several requests are kept in flight a few times a second as well, seldom enough to
cost it well under 1 %.
"""

import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from pocketllm.bench.targets.contract import Sample

POLL_S = 0.25
MIN_READINGS = 3
"""Readings that say how many requests run at a time: one alone may fall between two requests of a place."""
NAMES = {
    "running": r"pocketllm:num_requests_running|vllm:num_requests_running|sglang:num_running_reqs"
    r"|llamacpp:requests_processing",
    "waiting": r"pocketllm:num_requests_waiting|vllm:num_requests_waiting|sglang:num_queue_reqs"
    r"|llamacpp:requests_deferred",
    "compiles": r"pocketllm:num_compiles_total",
}
SERIES = {name: re.compile(rf"^(?:{stems})(?:\{{.*\}})? (\S+)$", re.MULTILINE) for name, stems in NAMES.items()}
"""What servers call these numbers under /metrics."""


@dataclass(frozen=True)
class Reading:
    """One answer of a server, between two stamps in perf_counter_ns; None: it does not tell."""

    asked_ns: int
    answered_ns: int
    running: int | None
    waiting: int | None = None
    compiles: int | None = None

    @property
    def in_flight(self) -> int | None:
        """Running and waiting, as far as it tells."""
        told = [count for count in (self.running, self.waiting) if count is not None]
        return sum(told) if told else None


def parse_metrics(text: str) -> dict[str, int | None]:
    """The three numbers of a Prometheus page, summed over their series.

    >>> parse_metrics('vllm:num_requests_running{engine="0"} 3.0')
    {'running': 3, 'waiting': None, 'compiles': None}
    """
    found = {name: pattern.findall(text) for name, pattern in SERIES.items()}
    return {name: round(sum(map(float, values))) if values else None for name, values in found.items()}


def parse_slots(slots: object) -> int | None:
    """How many of llama-server's slots work; None of anything else."""
    if not isinstance(slots, list) or not all(isinstance(slot, dict) and "is_processing" in slot for slot in slots):
        return None
    return sum(bool(slot["is_processing"]) for slot in slots)


class GaugeWatch:
    """Reads a server's gauges around one load, and while it runs where several requests are in flight."""

    def __init__(self, read: Callable[[], Reading | None], concurrency: int) -> None:
        self._read = read
        self._concurrency = concurrency
        self._readings: list[Reading] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gauge-watch", daemon=True)

    def _take(self) -> bool:
        reading = self._read()
        if reading is not None:
            self._readings.append(reading)
        return reading is not None

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._take()

    def __enter__(self) -> "GaugeWatch":
        if self._take() and self._concurrency > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._readings:
            self._take()

    def fill(self, samples: Sequence[Sample]) -> None:
        """Give every sample of the load what the server said."""
        running = self.running(samples)
        for sample in samples:
            sample.srv_running = running
            sample.compiles = self.compiles(sample)

    def running(self, samples: Sequence[Sample]) -> float | None:
        """Median running requests while all places were taken: from the send that fills them to the last send or the
        first end, what is later. The median, because a place is empty for a moment between two requests."""
        if not 1 < self._concurrency <= len(samples):
            return None
        sends = sorted(sample.t_send_ns for sample in samples)
        ends = [sample.t_last_ns for sample in samples if sample.t_last_ns is not None]
        begin, end = sends[self._concurrency - 1], max(sends[-1], min(ends, default=0))
        inside = [one for one in self._readings if begin <= one.asked_ns and one.answered_ns <= end]
        told = [one.running for one in inside if one.running is not None]
        return float(statistics.median(told)) if len(told) >= MIN_READINGS else None

    def compiles(self, sample: Sample) -> int | None:
        """What the server's counter grew by between the nearest readings outside this request."""
        end_ns = sample.t_last_ns or sample.t_send_ns
        told = [one for one in self._readings if one.compiles is not None]
        before = [one.compiles for one in told if one.answered_ns <= sample.t_send_ns]
        after = [one.compiles for one in told if one.asked_ns >= end_ns]
        if not before or not after:
            return None
        assert before[-1] is not None
        assert after[0] is not None
        return after[0] - before[-1]
