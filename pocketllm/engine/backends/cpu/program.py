"""Operations recorded once, laid out over reused memory, and replayed by one native call a step."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.cpu.library import Engine, Program, Step

Float32Array = npt.NDArray[np.float32]
Append = Callable[[Program, Sequence[int], Sequence[int]], None]
"""Append an operation to a program, given the addresses of its inputs and outputs."""

TOKENS, LOGIT_ROWS = 0, 1
"""Which of a step's counts is a buffer's number of rows; native/runtime/phase.h, `Rows`."""
LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20


class Field:
    """Stands for an array of the batch that a captured forward is called with; only operations may look at it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name} of a symbolic batch>"


SYMBOLIC = ForwardBatch(**{item.name: cast(Any, Field(item.name)) for item in fields(ForwardBatch)})
"""The batch that `capture` calls a forward with."""


@dataclass(eq=False)
class Value:
    """Rows that a recorded operation will compute: [tokens or logit rows, width]."""

    width: int
    rows: int


@dataclass(frozen=True)
class Command:
    """One recorded operation. in_place: (output, input) by number where the output may take the input's memory."""

    append: Append
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_place: tuple[tuple[int, int], ...] = ()


@dataclass
class Layout:
    """Which slot of memory each value gets; a slot is as wide as the widest value that is ever in it."""

    slot_of: dict[Value, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def take(self, width: int) -> int:
        """A free slot that needs to grow least; a new one when none is free."""
        if not self.free:
            self.widths.append(width)
            return len(self.widths) - 1
        slot = min(self.free, key=lambda slot: (max(0, width - self.widths[slot]), self.widths[slot]))
        self.free.remove(slot)
        self.widths[slot] = max(self.widths[slot], width)
        return slot


def lay_out(commands: Sequence[Command], result: Value) -> Layout:
    """Give every value a slot that nothing else uses from its making to its last use; the result keeps its own."""
    last_use = {value: number for number, command in enumerate(commands) for value in command.inputs}
    last_use[result] = len(commands)
    layout = Layout()
    for number, command in enumerate(commands):
        dying = {value for value in command.inputs if last_use[value] == number}
        for output, source in ((command.outputs[o], command.inputs[i]) for o, i in command.in_place):
            if source in dying and source.width == output.width and source.rows == output.rows:
                layout.slot_of[output] = layout.slot_of[source]
                dying.discard(source)
        for output in command.outputs:
            if output not in layout.slot_of:
                layout.slot_of[output] = layout.take(output.width)
        dying |= {output for output in command.outputs if output not in last_use}
        layout.free += [layout.slot_of[value] for value in dying]
    return layout


class Captured:
    """A recorded forward; call it with a batch of up to max_tokens."""

    def __init__(self, engine: Engine, commands: Sequence[Command], result: Value, max_tokens: int) -> None:
        layout = lay_out(commands, result)
        slot_bytes = [-(-4 * width * max_tokens // LINE_BYTES) * LINE_BYTES for width in layout.widths]
        starts = np.cumsum([0, *slot_bytes])
        # begun at a huge page, so that two captures of one forward lie alike in the caches: else they differ in speed
        memory = np.empty(int(starts[-1]) + HUGE_PAGE_BYTES, np.uint8)
        base = -(-memory.ctypes.data // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        address = {value: base + int(starts[slot]) for value, slot in layout.slot_of.items()}
        self._program = Program(engine, max_tokens)
        self._commands = tuple(commands)  # they hold what the program borrows: caches, matrices, vectors
        for command in commands:
            command.append(self._program, [address[v] for v in command.inputs], [address[v] for v in command.outputs])
        first = address[result] - memory.ctypes.data
        whole = memory[first : first + 4 * result.width * max_tokens].view(np.float32)
        self.result = whole.reshape(max_tokens, result.width)  # each call's, in its first rows
        self._count = "num_tokens" if result.rows == TOKENS else "num_logit_rows"
        self._step = Step()
        self._program.ready(base, int(starts[-1]))

    def __call__(self, batch: ForwardBatch) -> Float32Array:
        """Run a step; the result is a view that the next call overwrites."""
        step = self._step
        kept = fill(step, batch)
        self._program.run(step)
        del kept
        return self.result[: getattr(step, self._count)]


def fill(step: Step, batch: ForwardBatch) -> list[npt.NDArray[Any]]:
    """Write a batch's counts and addresses into step; what is returned must live until the step has run."""
    kept: list[npt.NDArray[Any]] = [
        np.ascontiguousarray(batch.input_ids, np.int32),
        np.ascontiguousarray(batch.positions, np.int32),
        np.ascontiguousarray(batch.query_start_loc, np.int32),
        np.ascontiguousarray(batch.seq_lens, np.int32),
        np.ascontiguousarray(batch.block_table, np.int32),
        np.ascontiguousarray(batch.slot_mapping, np.int64),
        np.ascontiguousarray(batch.logit_rows, np.int32),
        np.ascontiguousarray(batch.state_slots, np.int32),
        np.ascontiguousarray(batch.window_table, np.int32),
        np.ascontiguousarray(batch.window_slots, np.int64),
    ]
    assert kept[8].size in (0, kept[4].size), (kept[8].shape, kept[4].shape)
    step.num_tokens, step.num_logit_rows, step.num_state_slots = len(kept[0]), len(kept[6]), len(kept[7])
    step.num_sequences, step.table_width = kept[4].shape
    (
        step.input_ids,
        step.positions,
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        step.slot_mapping,
        step.logit_rows,
        step.state_slots,
        step.window_table,
        step.window_slots,
    ) = [array.ctypes.data for array in kept]
    if not len(batch.window_slots):
        step.window_table = step.window_slots = None
    return kept


def address_of(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p | None:
    """The same as an argument; None for none."""
    return None if array is None else ctypes.c_void_p(address_of(array))
