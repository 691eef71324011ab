"""Run a family's model over a backend without the scheduler: steps written out by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.select import BackendOptions, select_backend
from pocketllm.engine.models.contract import states_in
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint

Float32Array = npt.NDArray[np.float32]
Step = Sequence[tuple[int, int]]
"""(sequence, how many of its next tokens) for each sequence of one step."""
NUM_SLOTS = 9
"""Recurrent states, of a model that has some."""
GONE = -7
"""In place of a block that was given back."""


class Driver:
    """One loaded model with a paged cache; blocks are dealt out of order, as a long-running pool would have them.

    Of layers that see a window a sequence gives back what no later token sees, for others to write on.
    """

    def __init__(
        self, path: Path, block_size: int = 16, num_blocks: int = 96, threads: int | None = 1, ops: Ops | None = None
    ) -> None:
        self.checkpoint = open_checkpoint(path)
        family = find_family(self.checkpoint.architecture)
        assert family.unmet(self.checkpoint) == [], family.unmet(self.checkpoint)
        self.ops = ops or select_backend("reference", BackendOptions(threads=threads)).ops
        self.model = family.load(self.checkpoint, self.ops, max_model_len=block_size * num_blocks)
        self.block_size, self.num_blocks = block_size, num_blocks
        self.reset()

    def reset(self) -> None:
        """An empty cache, and a forward over it as the engine would run it."""
        spec = self.model.kv_spec
        self.cache = spec.allocate(self.ops, self.num_blocks, self.block_size, NUM_SLOTS, self.num_blocks)
        self.window = spec.window_tokens()
        self.free_windows = np.random.default_rng(5).permutation(self.num_blocks).tolist()
        self.windows: dict[int, list[int]] = {}
        self.states = states_in(spec, self.cache)
        tokens = self.block_size * self.num_blocks
        self.forward = self.ops.capture(lambda batch: self.model.forward(batch, self.cache), tokens)
        self.free = np.random.default_rng(3).permutation(self.num_blocks).tolist()
        self.free_slots = np.random.default_rng(4).permutation(NUM_SLOTS).tolist()
        self.slots: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}

    def run(self, prompts: Sequence[Sequence[int]], steps: Sequence[Step]) -> list[Float32Array]:
        """Logits of every position of every prompt that the steps covered: one [positions, vocab] a prompt."""
        rows: list[list[Float32Array]] = [[] for _ in prompts]
        for step in steps:
            logits = self.step(prompts, step)
            at = 0
            for sequence, count in step:
                rows[sequence].append(logits[at : at + count])
                at += count
        return [np.concatenate(part) if part else np.zeros((0, 0), np.float32) for part in rows]

    def follow(self, source: int, target: int) -> None:
        """Let a new sequence go on from the full blocks of another, which ends there, and from a copy of its state."""
        assert self.done[source] % self.block_size == 0
        self.blocks[target], self.done[target] = list(self.blocks[source]), self.done[source]
        self.windows[target] = list(self.windows[source])
        for states in self.states:
            places = (np.array([self.slot(sequence)], np.int32) for sequence in (source, target))
            self.ops.copy_states(states, *places)

    def slot(self, sequence: int) -> int:
        """Where a sequence keeps its recurrent state."""
        if sequence not in self.slots:
            self.slots[sequence] = self.free_slots.pop()
        return self.slots[sequence]

    def step(self, prompts: Sequence[Sequence[int]], step: Step) -> Float32Array:
        """One forward; logits of all its tokens."""
        batch = self.batch(prompts, step)
        logits: Float32Array = self.model.logits(self.forward(batch))
        return logits

    def batch(self, prompts: Sequence[Sequence[int]], step: Step) -> ForwardBatch:
        """Give each sequence the blocks it needs and write the step down."""
        ids, positions, slots, lengths, window_slots = [], [], [], [], []
        for sequence, count in step:
            start = self.done.get(sequence, 0)
            self.done[sequence] = start + count
            table = self.blocks.setdefault(sequence, [])
            while len(table) * self.block_size < start + count:
                table.append(self.free.pop())
            at = np.arange(start, start + count)
            ids.extend(prompts[sequence][start : start + count])
            positions.extend(at)
            slots.extend(np.array(table)[at // self.block_size] * self.block_size + at % self.block_size)
            own = np.array(self.slide(sequence, start, len(table)))
            window_slots.extend(own[at // self.block_size] * self.block_size + at % self.block_size)
            lengths.append(start + count)
        width = max(len(self.blocks[sequence]) for sequence, _ in step)
        table = np.full((len(step), width), -1, np.int32)
        for row, (sequence, _) in enumerate(step):
            table[row, : len(self.blocks[sequence])] = self.blocks[sequence]
        windows = np.full_like(table, -1)
        for row, (sequence, _) in enumerate(step):
            own = self.windows[sequence]
            windows[row, : len(own)] = [own[-1] if block == GONE else block for block in own]
        in_windows = {"window_table": windows, "window_slots": np.array(window_slots, np.int64)} if self.window else {}
        return ForwardBatch(
            input_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            query_start_loc=np.cumsum([0, *(count for _, count in step)]).astype(np.int32),
            seq_lens=np.array(lengths, np.int32),
            block_table=table,
            slot_mapping=np.array(slots, np.int64),
            logit_rows=np.arange(len(ids), dtype=np.int32),
            state_slots=np.array([self.slot(sequence) for sequence, _ in step if self.states], np.int32),
            **in_windows,
        )

    def slide(self, sequence: int, start: int, num_blocks: int) -> list[int]:
        """A sequence's blocks of layers that see a window, as its tokens from `start` on need them."""
        own = self.windows.setdefault(sequence, [])
        for index in range(max(start - self.window + 1, 0) // self.block_size if self.window else 0):
            if own[index] != GONE:
                self.free_windows.append(own[index])
                own[index] = GONE
        while len(own) < num_blocks:
            own.append(self.free_windows.pop())
        return own


def chunks(length: int, size: int) -> list[Step]:
    """Steps that feed one sequence `size` tokens at a time."""
    return [[(0, min(size, length - at))] for at in range(0, length, size)]


def nmse(got: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """Squared error over the squared size of what was expected."""
    difference = got.astype(np.float64) - expected.astype(np.float64)
    return float((difference**2).sum() / (expected.astype(np.float64) ** 2).sum())
