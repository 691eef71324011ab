"""Parallel residual streams on the native library."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.ops import HyperConnection, Norm
from pocketllm.engine.backends.cpu.library import Program, StreamsPlan
from pocketllm.engine.backends.cpu.operations.projections import Projector
from pocketllm.engine.backends.cpu.operations.recorder import width_of
from pocketllm.engine.backends.cpu.program import pointer


class StreamOps(Projector):
    """Operations on rows of several streams side by side."""

    def open_streams(self, x: Any, num_streams: int) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("open_streams", inputs[0], width_of(x), num_streams, outputs[0])

        return self.compute(append, (x,), (num_streams * width_of(x),))[0]

    def read_streams(self, streams: Any, connection: HyperConnection) -> tuple[Any, Any]:
        """The connection's norm has no weight of its own: it is one of ones."""
        count, width = connection.num_streams, width_of(streams)
        norm = Norm(np.ones(width, np.float32), connection.norm_eps)
        logits = self.project(streams, connection.weight, norm=norm)[0]
        plan = StreamsPlan(
            count,
            connection.iterations,
            connection.eps,
            connection.clamp,
            pointer(connection.scale),
            pointer(connection.base),
        )

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("read_streams", inputs[0], width, inputs[1], plan, *outputs)

        shares = count + count * count
        read, kept = self.compute(append, (streams, logits), (width // count, shares))
        return read, kept

    def write_streams(self, streams: Any, shares: Any, y: Any) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("write_streams", inputs[0], width_of(streams), inputs[1], inputs[2], width_of(y), outputs[0])

        return self.compute(append, (streams, shares, y), (width_of(streams),))[0]

    def mean_streams(self, streams: Any, num_streams: int) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("mean_streams", inputs[0], width_of(streams), num_streams, outputs[0])

        return self.compute(append, (streams,), (width_of(streams) // num_streams,))[0]
