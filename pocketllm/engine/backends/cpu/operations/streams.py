"""Parallel residual streams on the native library."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.cpu.library import Program, StreamsPlan
from pocketllm.engine.backends.cpu.operations.projections import Projector
from pocketllm.engine.backends.cpu.operations.recorder import rows_of, width_of
from pocketllm.engine.backends.cpu.program import pointer


class StreamOps(Projector):
    """Operations on rows of several streams side by side."""

    def open_streams(self, x: Any, num_streams: int) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("open_streams", inputs[0], width_of(x), num_streams, outputs[0])

        return self.compute(append, (x,), (num_streams * width_of(x),))[0]

    def read_streams(self, streams: Any, connection: HyperConnection) -> tuple[Any, Any]:
        return self._read(streams, connection, connection.clamp, is_soft=False)

    def read_soft_streams(self, streams: Any, connection: SoftConnection) -> tuple[Any, Any]:
        return self._read(streams, connection, 0.0, is_soft=True)

    def _read(
        self, streams: Any, connection: HyperConnection | SoftConnection, clamp: float, is_soft: bool
    ) -> tuple[Any, Any]:
        """The connection's norm has no weight of its own: it is one of ones."""
        count, width = connection.num_streams, width_of(streams)
        norm = Norm(np.ones(width, np.float32), connection.norm_eps)
        logits = self.project(streams, connection.weight, norm=norm)[0]
        weights = pointer(connection.scale), pointer(connection.base)
        plan = StreamsPlan(count, connection.iterations, connection.eps, clamp, *weights, is_soft)
        plan.connection_kept = connection  # whoever borrows its addresses holds the plan

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("read_streams", rows_of(streams), inputs[0], width, inputs[1], plan, *outputs)

        shares = width_of(logits) - count  # none of a connection that only reads
        read, kept = self.compute(append, (streams, logits), (width // count, shares))
        return read, kept

    def write_streams(self, streams: Any, shares: Any, y: Any) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("write_streams", inputs[0], width_of(streams), inputs[1], inputs[2], width_of(y), outputs[0])

        return self.compute(append, (streams, shares, y), (width_of(streams),))[0]

    def mean_streams(self, streams: Any, num_streams: int) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("mean_streams", rows_of(streams), inputs[0], width_of(streams), num_streams, outputs[0])

        return self.compute(append, (streams,), (width_of(streams) // num_streams,))[0]

    def add_gated(self, streams: Any, gates: Any, y: Any) -> Any:
        width, hidden = width_of(streams), width_of(y)
        assert width == width_of(gates) * hidden, (width, width_of(gates), hidden)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("gated_streams", inputs[0], width, inputs[1], inputs[2], hidden, outputs[0])

        return self.compute(append, (streams, gates, y), (width,), in_place=((0, 0),))[0]

    def gate_streams(self, keys: Any, queries: Any, value: Any) -> Any:
        width, hidden = width_of(keys), width_of(value)
        assert width == width_of(queries), (width, width_of(queries))

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("gate_streams", inputs[0], width, inputs[1], inputs[2], hidden, outputs[0])

        return self.compute(append, (keys, queries, value), (width,))[0]
