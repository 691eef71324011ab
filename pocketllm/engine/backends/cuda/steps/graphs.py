"""Steps as CUDA graphs: captured for a ladder of sizes, replayed on device buffers that stay where they are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import EMPTY_BATCH, ForwardBatch
from pocketllm.engine.backends.api.drawing import Drawer
from pocketllm.engine.backends.cuda.steps.batch import (
    TILE_QUERIES,
    DeviceBatch,
    Sizes,
    fill,
    named,
    sizes_of,
    to_device,
    views_of,
)
from pocketllm.engine.backends.cuda.steps.widths import WIDTHS

TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens that other steps are captured for."""
SHORTEST, NARROWEST = 256, 32
"""Keys and blocks that a captured step has room for at least; both double from there, so that a long conversation is
captured few times."""
Forward = Callable[[DeviceBatch], Tensor]


@dataclass
class Graph:
    """One captured computation and what it leaves."""

    graph: torch.cuda.CUDAGraph
    result: Any


class Mark:
    """An event on the current stream, recorded in a tenth of the time: torch looks for that stream by thirty calls."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._device = torch.cuda.current_device()

    def record(self) -> None:
        """It happens when everything until now has."""
        self._event.record(current_stream(torch._C._cuda_getCurrentRawStream(self._device)))

    def synchronize(self) -> None:
        """Return when it has happened, or was never recorded; other threads run meanwhile."""
        self._event.synchronize()


@cache
def current_stream(handle: int) -> torch.cuda.Stream:
    """The current stream by its handle: one object for each."""
    return torch.cuda.current_stream()


def capture(run: Callable[[], Any], pool: Any) -> Graph:
    """Run once, which compiles what is not compiled yet, then capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return Graph(graph, result)


class StepGraph:
    """A step of certain sizes."""

    def __init__(self, forward: Forward, sizes: Sizes, pool: Any) -> None:
        self._sizes = sizes
        self._host = torch.zeros(sum(sizes.of_arrays), dtype=torch.int32).pin_memory()
        self._filled = self._host.numpy()
        self._views = views_of(self._filled, sizes)
        fill(self._filled, self._views, EMPTY_BATCH, sizes)
        self._device = self._host.to("cuda")
        # a decode step's rows are its tokens
        batch = named(self._device, sizes, takes_all=sizes.rows == 0)
        self._captured = capture(lambda: forward(batch), pool)
        self._sent = Mark()
        self.heads: dict[tuple[int, ...], Graph] = {}
        """Products of the result with a head, by what was asked of them."""

    @property
    def result(self) -> Tensor:
        """Hidden states of all rows, overwritten by the next step."""
        result: Tensor = self._captured.result
        return result

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Run a step; the result's rows are those of the batch."""
        self._sent.synchronize()  # the last copy has read the host's buffer
        fill(self._filled, self._views, batch, self._sizes)
        self._device.copy_(self._host, non_blocking=True)
        self._sent.record()
        self._captured.graph.replay()
        return self.result[: len(batch.logit_rows)]


class Captured:
    """A forward that replays the steps that fit the ladder and runs others one operation after another."""

    def __init__(
        self,
        forward: Forward,
        drawer: Drawer,
        device: torch.device,
        max_tokens: int,
        on_capture: Callable[[], None],
    ) -> None:
        """drawer: whose tokens the steps take; on_capture: called when a step has been captured."""
        self.drawer = drawer
        self._forward = forward
        self._on_capture = on_capture
        self._device = device
        self._max_tokens = max_tokens
        self._graphs: dict[Sizes, StepGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.last: tuple[Tensor, StepGraph] | None = None
        """The latest result if it came from a graph, and that graph."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Run a step; the result is overwritten by the next."""
        sizes = None if self._pool is None else captured_sizes(sizes_of(batch))
        if sizes is None or sizes.tokens > max(power_above(self._max_tokens), TOKENS[0]):
            self.last = None
            return self.eager(batch)
        if sizes not in self._graphs:
            self._graphs[sizes] = StepGraph(self._forward, sizes, self._pool)
            self._on_capture()
        graph = self._graphs[sizes]
        result = graph.replay(batch)
        self.last = result, graph
        return result

    def eager(self, batch: ForwardBatch) -> Tensor:
        """The same step, one operation after another."""
        return self._forward(to_device(batch, self._device))


def captured_sizes(own: Sizes) -> Sizes | None:
    """The sizes of the ladder that a step fits into; None for a step that is run without a graph."""
    length = max(SHORTEST, power_above(own.max_length)) if own.singles else 0
    table_width = max(NARROWEST, power_above(own.table_width))
    is_decode = own.singles == own.tokens == own.rows
    if is_decode and own.tokens <= WIDTHS[-1]:
        width = next(width for width in WIDTHS if width >= own.tokens)
        return Sizes(width, width, width, 0, 0, table_width, length, own.has_windows, own.has_states)
    seqs = power_above(own.seqs + 1)
    if own.tokens > TOKENS[-1] or own.rows > seqs:
        return None
    tokens = next(tokens for tokens in TOKENS if tokens >= own.tokens)
    singles = power_above(own.singles) if own.singles else 0
    tiles = tokens // TILE_QUERIES + seqs
    return Sizes(tokens, seqs, singles, tiles, seqs, table_width, length, own.has_windows, own.has_states)


def power_above(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()
