"""Many requests in flight from one client process: a thread each, and a watch on how late threads wake."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from pocketllm.bench.targets.contract import MAX_STREAMS, Ask, Sample

Send = Callable[[Ask, int], Sample]
"""(request, when it was to leave in perf_counter_ns) → its sample."""

TICK_S = 0.005


class LagWatch:
    """Sleeps in short ticks and keeps how much later than asked each one ended: what our own stamps may be late by.

    What even the best tick is late by is the timer's own coarseness, which no byte from a socket waits for.
    """

    def __init__(self) -> None:
        self._ticks: list[tuple[int, int, int]] = []
        """Begin, end, and how much too long it was."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lag-watch", daemon=True)

    def _watch(self) -> None:
        tick_ns = int(TICK_S * 1e9)
        while not self._ended.is_set():
            begin = time.perf_counter_ns()
            time.sleep(TICK_S)
            end = time.perf_counter_ns()
            self._ticks.append((begin, end, max(0, end - begin - tick_ns)))

    def p99_ms(self, begin_ns: int, end_ns: int) -> float | None:
        """The 99th percentile of the delays of ticks that ran between two stamps, beyond the best tick's.

        None when none did. Not the longest: one tick that lost its core is not what most stamps are late by.
        """
        late = sorted(delay for begin, end, delay in self._ticks if begin <= end_ns and begin_ns <= end)
        best = min((delay for _, _, delay in self._ticks), default=0)
        return (late[math.ceil(0.99 * len(late)) - 1] - best) / 1e6 if late else None

    def __enter__(self) -> "LagWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()


class Queue:
    """The requests of one load, handed out in order to as many threads as there are places."""

    def __init__(self, asks: Sequence[Ask], send: Send) -> None:
        self.asks = asks
        self.send = send
        self.samples: list[Sample | None] = [None] * len(asks)
        self._begin_ns = time.perf_counter_ns()
        self._places = iter(sorted(range(len(asks)), key=lambda place: asks[place].offset_s or 0.0))
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def places(self) -> Iterator[int]:
        """Places not yet handed out, until the load is given up."""
        while not self._stopped.is_set():
            with self._lock:
                place = next(self._places, None)
            if place is None:
                return
            yield place

    def work(self) -> None:
        """One place: a request after the other."""
        for place in self.places():
            ask, now = self.asks[place], time.perf_counter_ns()
            due = now if ask.offset_s is None else self._begin_ns + round(ask.offset_s * 1e9)
            if due > now and self._stopped.wait((due - now) / 1e9):
                return
            self.samples[place] = self.send(ask, due)

    def stop(self) -> None:
        """Hand out nothing more; what is in flight runs to its end."""
        self._stopped.set()


def run_load(send: Send, asks: Sequence[Ask], concurrency: int) -> list[Sample]:
    """All requests, as `Target.load` promises; each sample with the lag of its own time.

    Requests with an offset have a place each, up to MAX_STREAMS: one more waits, which t_send_ns shows.
    """
    timed = sum(ask.offset_s is not None for ask in asks)
    assert timed in (0, len(asks)), "a load is open or closed, not both"
    num_places = min(MAX_STREAMS, timed or concurrency, len(asks))
    queue = Queue(asks, send)
    with LagWatch() as watch:
        if num_places == 1:
            queue.work()
        else:
            work_in_threads(queue, num_places)
    samples = [sample for sample in queue.samples if sample is not None]
    assert len(samples) == len(asks), (len(samples), len(asks))
    for sample in samples:
        sample.loop_lag_ms = watch.p99_ms(sample.t_send_ns, sample.t_last_ns or sample.t_send_ns)
    return samples


def work_in_threads(queue: Queue, num_places: int) -> None:
    """All places at once; an interrupt hands out nothing more and waits for what is in flight."""
    with ThreadPoolExecutor(num_places, thread_name_prefix="bench-stream") as pool:
        try:
            for future in [pool.submit(queue.work) for _ in range(num_places)]:
                future.result()
        except BaseException:
            queue.stop()
            raise
