"""Where a load's time goes; `tests.cuda.loading profile` prints it."""

import cProfile
import io
import pstats
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.matrices import uploads
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.weights.tensor_file import Stored

LONGEST = 10
PLACES: tuple[tuple[str, Any, str], ...] = (
    ("waits for bytes that are being read", Future, "result"),
    ("waits for the device", torch.cuda.Event, "synchronize"),
    ("starts repacking", matrices, "repack"),
    ("makes room on the device", matrices, "new_packed"),
    ("copies vectors", CudaOps, "load_vector"),
    ("hands pieces to threads", uploads.ThreadPoolExecutor, "submit"),
    ("threads: make pinned memory", uploads, "new_memory"),
    ("threads: read", Stored, "read_into"),
)
"""What a second is spent at, and the function it is spent in."""


@contextmanager
def clocks(seconds: dict[str, float], calls: dict[str, int]) -> Iterator[None]:
    """Add up what each of the places takes; threads' seconds are summed."""
    lock, changed = threading.Lock(), [patch.object(owner, name, None) for _, owner, name in PLACES]

    def timed(what: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return sound(*words, **options)
            finally:
                with lock:
                    seconds[what] += time.perf_counter() - start
                    calls[what] += 1

        return call

    for change, (what, owner, name) in zip(changed, PLACES, strict=True):
        change.new = timed(what, getattr(owner, name))
    for change in changed:
        change.start()
    try:
        yield
    finally:
        for change in changed:
            change.stop()


def profile(load: Callable[[], float]) -> None:
    """Three loads more: one with clocks, one under torch's profiler, one under Python's."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    with clocks(seconds, calls):
        took = load()
    print(f"with clocks {took:.3f} s:")
    for what, _, _ in PLACES:
        print(f"  {seconds[what]:7.3f} s in {calls[what]:5d} calls: {what}")
    on_device(load)
    by_python(load)


def on_device(load: Callable[[], float]) -> None:
    """What the device is busy with."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        took = load()
    found = profiler.key_averages()
    if not has_gpu:
        print(f"under torch's profiler {took:.3f} s, no GPU; {len(found)} kinds of operations")
        return
    kernels = [event for event in found if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    print(f"under torch's profiler {took:.3f} s, the device busy for {busy:.3f} s; what takes longest:")
    for event in kernels[:LONGEST]:
        print(f"  {event.self_device_time_total / 1e6:7.4f} s in {event.count:5d}: {event.key[:90]}")


def by_python(load: Callable[[], float]) -> None:
    """The loading thread's own functions."""
    profiler, out = cProfile.Profile(), io.StringIO()
    took = profiler.runcall(load)
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(LONGEST + 5)
    print(f"under Python's profiler {took:.3f} s:")
    print("\n".join(line for line in out.getvalue().splitlines() if line.strip()))
