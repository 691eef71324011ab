"""Checks of entries of groups and of attention over them against the reference backend.

usage: python -m tests.cuda.compressed [entries]   (TRITON_INTERPRET=1 without a GPU)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import Compressor
from pocketllm.engine.backends.api.ops import Norm
from tests.cuda.interpreted import rows
from tests.cuda.recurrent import NUM_SLOTS, RANDOM, STEPS, Segment, batch_of, compared, states_of
from tests.cuda.words import asked

LONGEST = 140
OWN_STEPS: tuple[Sequence[Segment], ...] = (
    *STEPS,
    *([(3, 131 + number, 1), (1, 4 + number, 1), (6, 64 + number, 1)] for number in range(7)),
)
"""A ragged prompt, mixed steps, and decode steps in which groups end."""


def paged(segments: Sequence[Segment], block_size: int) -> ForwardBatch:
    """A step whose sequences have scattered blocks, each of its own."""
    width = -(-LONGEST // block_size)
    table = np.random.default_rng(1).permutation(NUM_SLOTS * width).reshape(NUM_SLOTS, width).astype(np.int32)
    batch = batch_of(segments)
    return replace(batch, block_table=table[batch.state_slots])


def random_rows(width: int, steps: Sequence[Sequence[Segment]] = OWN_STEPS) -> list[Any]:
    """Rows of each step's tokens."""
    return [RANDOM.standard_normal((sum(part[2] for part in step), width)).astype(np.float32) for step in steps]


@dataclass
class Groups:
    """What makes entries of groups, on any backend."""

    ratio: int
    overlaps: bool
    dim: int
    num_freq: int
    block_size: int

    def __post_init__(self) -> None:
        self.width = self.dim * (1 + self.overlaps)
        self.rows = random_rows(2 * self.width)
        self.place = RANDOM.standard_normal((self.ratio, self.width)).astype(np.float32)
        self.weight = RANDOM.standard_normal(self.dim).astype(np.float32)

    def compressor(self, ops: Any) -> Compressor:
        """With a norm and a rotation, or without both."""
        norm = Norm(ops.load_vector(self.weight), 1e-5) if self.num_freq else None
        freq = ops.load_vector(10.0 ** -np.arange(self.num_freq).astype(np.float32)) if self.num_freq else None
        return Compressor(self.ratio, self.dim, self.overlaps, rows(ops, self.place), norm, freq)

    def run(self, ops: Any) -> list[Any]:
        """All entries after each step."""
        how, cache = self.compressor(ops), self.cache(ops, 2)
        states = states_of(ops, (self.ratio * (1 + self.overlaps) - 1, 2 * self.width), (0, 0, 0))
        results = []
        for step, some in zip(OWN_STEPS, self.rows, strict=True):
            wide = rows(ops, some)  # rows with gaps between
            parts = ops.columns(wide, 0, self.width), ops.columns(wide, self.width, 2 * self.width)
            ops.compress(*parts, states, 1, cache, 1, paged(step, self.block_size), how)
            results.append(cache.rows[1].reshape(-1, self.dim).clone())
        assert not cache.rows[0].any()
        return results

    def cache(self, ops: Any, layers: int) -> Any:
        count = NUM_SLOTS * -(-LONGEST // self.block_size)
        return ops.new_compressed_cache(layers, self.dim, self.ratio, count, self.block_size)


def entries() -> None:
    """Groups that overlap and that do not, longer and shorter than a block; with and without norm and rotation."""
    for groups in (Groups(4, True, 24, 4, 16), Groups(6, False, 20, 0, 4), Groups(32, False, 12, 6, 16)):
        compared(groups.run, 1e-6)


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (entries,)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
