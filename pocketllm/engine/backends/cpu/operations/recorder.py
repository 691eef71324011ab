"""Operations that are recorded and replayed as one native call, or run one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import EMPTY_BATCH, ForwardBatch
from pocketllm.engine.backends.cpu.library import Engine, Program, Step
from pocketllm.engine.backends.cpu.program import LOGIT_ROWS, TOKENS, Append, Command, Value, address_of, fill

ACTIVATIONS = ("int8", "int16", "float32")
"""In the order of native/kernels.h, `Activations`."""


class Result(np.ndarray[Any, Any]):
    """Rows that an operation has just computed; `to_numpy` may hand the memory itself to the first who asks."""

    is_shared = False


class Recorder:
    """What the operations of one engine have in common: `compute` appends to what is recorded, or runs at once."""

    engine: Engine
    activations: int
    """What rows become before they meet quantized matrices, one of ACTIVATIONS by its place."""
    wide_activations: int
    """The same before those that are wide."""
    kv_dtype: int
    """What caches are kept in, by its place in `caches.KV_DTYPES`."""
    recorded: list[Command] | None = None

    def compute(
        self,
        append: Append,
        inputs: Sequence[Any],
        widths: Sequence[int],
        batch: ForwardBatch | None = None,
        rows: int | None = None,
        in_place: tuple[tuple[int, int], ...] = (),
    ) -> tuple[Any, ...]:
        """Outputs of one operation, each [rows, width]; rows: those of the inputs unless said."""
        if self.recorded is None:
            return self._run(append, inputs, widths, batch, rows)
        which = rows if rows is not None else inputs[0].rows if inputs else TOKENS
        outputs = tuple(Value(width, which) for width in widths)
        self.recorded.append(Command(append, tuple(inputs), outputs, in_place))
        return outputs

    def _run(
        self, append: Append, inputs: Sequence[Any], widths: Sequence[int], batch: ForwardBatch | None, rows: int | None
    ) -> tuple[Any, ...]:
        arrays = [np.ascontiguousarray(x, np.float32) for x in inputs]
        step = Step()
        kept = fill(step, batch or EMPTY_BATCH)
        if arrays:
            assert len({len(x) for x in arrays}) == 1, [x.shape for x in arrays]
            step.num_tokens = len(arrays[0])
        count = step.num_logit_rows if rows == LOGIT_ROWS else step.num_tokens
        outputs = tuple(Result((count, width), np.float32) for width in widths)
        program = Program(self.engine, max(1, step.num_tokens))
        append(program, [address_of(x) for x in arrays], [address_of(x) for x in outputs])
        program.run(step)
        del kept
        return outputs


def width_of(x: Any) -> int:
    """Values in a row."""
    return x.width if isinstance(x, Value) else x.shape[-1]


def rows_of(x: Any) -> int:
    """Which count of a step x has as its number of rows; what is computed at once has tokens."""
    return x.rows if isinstance(x, Value) else TOKENS


def batch_of(**arrays: Any) -> ForwardBatch:
    """A batch that has these fields only."""
    return replace(EMPTY_BATCH, **arrays)
