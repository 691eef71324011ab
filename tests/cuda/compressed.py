"""Checks of entries of groups and of attention over them against the reference backend.

usage: python -m tests.cuda.compressed [entries] [rotations] [windows] [more_windows] [spare]
           (TRITON_INTERPRET=1 without a GPU)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.compressed import Compressor, WindowSpec
from pocketllm.engine.backends.api.ops import Norm, Ops
from pocketllm.engine.backends.cuda.layers.compressed import window as cuda_window
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.families import checkpoint
from tests.cuda.interpreted import rows
from tests.cuda.mixtures import DEVICE, poisoned
from tests.cuda.model import in_spare_places
from tests.cuda.recurrent import NUM_SLOTS, RANDOM, Segment, batch_of, compared, states_of
from tests.cuda.words import asked
from tests.parity.drive import Driver

LONGEST = 48
OWN_STEPS: tuple[Sequence[Segment], ...] = (
    [(5, 0, 2), (0, 0, 1), (3, 0, 40), (1, 0, 3)],
    [(0, 1, 1), (1, 3, 1), (5, 2, 1)],
    [(3, 40, 1), (6, 0, 12), (5, 3, 9)],
    *([(3, 41 + number, 1), (1, 4 + number, 1), (6, 12 + number, 1)] for number in range(5)),
)
"""A ragged prompt, a decode step, both at once, and decode steps in which groups end."""


def paged(segments: Sequence[Segment], block_size: int) -> ForwardBatch:
    """A step whose sequences have scattered blocks, each of its own."""
    width = -(-LONGEST // block_size)
    table = np.random.default_rng(1).permutation(NUM_SLOTS * width).reshape(NUM_SLOTS, width).astype(np.int32)
    batch = batch_of(segments)
    return replace(batch, block_table=table[batch.state_slots])


def random_rows(width: int) -> list[Any]:
    """Rows of each step's tokens."""
    return [RANDOM.standard_normal((sum(part[2] for part in step), width)).astype(np.float32) for step in OWN_STEPS]


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
    for groups in (Groups(4, True, 24, 4, 16), Groups(6, False, 20, 0, 4), Groups(22, False, 12, 6, 16)):
        compared(groups.run, 1e-6)


def rotations() -> None:
    """The last values of heads, forwards and back; of heads that are normed where they are read too."""
    x, positions = RANDOM.standard_normal((3, 4 * 20)).astype(np.float32), np.array([0, 7, 12345], np.int32)
    freq, weight = (10.0 ** -np.arange(3)).astype(np.float32), RANDOM.standard_normal(20).astype(np.float32)

    def run(ops: Any) -> list[Any]:
        angles = ops.rope_angles(ops.load_vector(freq), positions, 1.0)
        normed = ops.rms_norm(rows(ops, x), Norm(ops.load_vector(weight), 1e-5))
        turned = ops.rope_last(normed, angles, 20)
        return [
            turned,
            ops.rope_last(turned, angles, 20, inverse=True),
            ops.rope_last(rows(ops, x[:, :20]), angles, 20),
        ]

    compared(run, 1e-6)


@dataclass
class Windows:
    """Attention over a window, and over entries of groups of `ratio` tokens: all of them, or some that scores pick."""

    heads: int
    dim: int
    window: int
    ratio: int
    top_k: int
    split: int

    def __post_init__(self) -> None:
        self.q, self.rows = random_rows(self.heads * self.dim), random_rows(self.dim)
        self.sinks = RANDOM.standard_normal(self.heads).astype(np.float32) * 3
        self.count = NUM_SLOTS * -(-LONGEST // 16)
        places = self.count * -(-16 // max(self.ratio, 1))
        self.entries = RANDOM.standard_normal((places, self.dim)).astype(np.float32)
        # many scores are equal
        self.keys = RANDOM.integers(-2, 3, (places, 8)).astype(np.float32)
        self.index_q = [np.round(some) for some in random_rows(3 * 8)]
        self.weights = [np.round(some) for some in random_rows(3)]

    def run(self, ops: Any) -> list[Any]:
        """What heads find in each step."""
        cuda_window.SPLIT, cuda_window.MOST_SPLITS, cuda_window.MERGED_AT_ONCE = (self.split,) * 2, (3, 7), 2
        states = states_of(ops, (self.window - 1, self.dim), (0, 0, 0))
        freq = ops.load_vector(np.array([1.0, 0.1], np.float32))
        weight = Norm(ops.load_vector(np.linspace(0.5, 2, self.dim).astype(np.float32)), 1e-5)
        spec, results = WindowSpec(self.heads, self.dim, self.window, self.dim**-0.5), []
        for number, step in enumerate(OWN_STEPS):
            batch = paged(step, 16)
            angles = ops.rope_angles(freq, batch.positions, 1.0)
            q = ops.rope_last(ops.rms_norm(rows(ops, self.q[number]), weight), angles, self.dim)
            own = ops.rope_last(rows(ops, self.rows[number]), angles, self.dim)
            near = q, own, rows(ops, self.sinks), states, 1, batch, spec
            results.append(ops.window_attention(*near, *self.far(ops, number, batch)))
        return results

    def far(self, ops: Any, number: int, batch: ForwardBatch) -> tuple[Any, ...]:
        """A cache, its layer, and a selection."""
        if not self.ratio:
            return ()
        cache = ops.new_compressed_cache(2, self.dim, self.ratio, self.count, 16)
        cache.rows[1].view(self.entries.shape).copy_(rows(ops, self.entries))
        if not self.top_k:
            return cache, 1
        keys = ops.new_compressed_cache(1, 8, self.ratio, self.count, 16)
        keys.rows[0].view(self.keys.shape).copy_(rows(ops, self.keys))
        q, weights = rows(ops, self.index_q[number]), rows(ops, self.weights[number])
        return cache, 1, ops.select_entries(q, weights, keys, 0, batch, IndexerSpec(3, 8, self.top_k))


def windows() -> None:
    """A window beside picked entries, in several splits."""
    compared(Windows(5, 24, 9, 4, 3, split=8).run, 1e-5)


def more_windows() -> None:
    """Beside all entries, alone, and with more picks than there are entries; one split, many heads and a single one."""
    for case in (
        Windows(17, 16, 5, 6, 0, split=4),
        Windows(2, 20, 34, 0, 0, split=16),
        Windows(1, 16, 2, 4, 100, split=64),
    ):
        compared(case.run, 1e-5)


def spare() -> None:
    """A mixed step and a decode step of a tiny deepseek4 have the same bits with the spare places of graphs."""
    with TemporaryDirectory() as work:
        driver = Driver(checkpoint("deepseek4_tight_limits", Path(work)), ops=cast(Ops, CudaOps("float32", DEVICE)))
    ids = [list(range(20 + number, 40 + number)) for number in (0, 1, 2, 0, 1, 2)]
    captured: Any = driver.forward
    for counts in ((13, 1, 5), (1, 1, 1)):
        own, others = (
            driver.batch(ids, [(first + number, count) for number, count in enumerate(counts)]) for first in (0, 3)
        )
        ends = np.cumsum(counts).astype(np.int32) - 1
        with poisoned():
            got = driver.model.logits(in_spare_places(captured, replace(own, logit_rows=ends)))
            want = driver.model.logits(captured.eager(replace(others, logit_rows=ends)))
        assert np.array_equal(got, want), counts


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (entries, rotations, windows, more_windows, spare)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
