"""Draws as CUDA graphs, by where their logits lie."""

from collections.abc import Callable, Hashable
from typing import Any

from pocketllm.engine.backends.cuda.steps.graphs import Graph

MOST_GRAPHS = 256
"""Each step width and kind of draw has one; further ones run as they are."""
MOST_REMEMBERED = 64
"""Keys that came once; the oldest is forgotten, for many never come again."""


class Replayed:
    """Runs what it is given; what comes a second time under a key is captured, and replayed from then on."""

    def __init__(self, capture: Callable[[Callable[[], None]], Graph] | None, on_capture: Callable[[], None]) -> None:
        """capture: None where nothing can be captured; on_capture: called when something has been."""
        self._capture = capture
        self._on_capture = on_capture
        self._graphs: dict[Hashable, Graph] = {}
        self._once: dict[Hashable, Any] = {}

    def run(self, key: Hashable, run: Callable[[], None]) -> None:
        """The key names all that `run` reads and writes, and everything it is decided by."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.graph.replay()
            return
        if self._capture is not None and len(self._graphs) < MOST_GRAPHS:
            if key in self._once:
                del self._once[key]
                self._graphs[key] = self._capture(run)
                self._on_capture()
            else:
                self._once[key] = None
                if len(self._once) > MOST_REMEMBERED:
                    del self._once[next(iter(self._once))]
        run()
