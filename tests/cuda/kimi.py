"""Checks of Kimi's delta rule against the reference backend: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.kimi [rule] [rules]   (TRITON_INTERPRET=1 without a GPU)
       python -m tests.cuda.kimi [large] [times] [sweep]   (on a GPU)
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.recurrent import KimiDelta
from pocketllm.engine.backends.cuda.layers.recurrent import kimi
from pocketllm.engine.backends.cuda.steps.batch import to_device
from tests.cuda.interpreted import rows
from tests.cuda.kernels import timed
from tests.cuda.mixtures import CUDA, DEVICE
from tests.cuda.recurrent import NUM_SLOTS, STEPS, Segment, batch_of, changed, compared, states_of
from tests.cuda.words import asked

FEW_STEPS: tuple[Sequence[Segment], ...] = (
    [(5, 0, 2), (0, 0, 1), (3, 0, 70)],
    [(0, 1, 1), (5, 2, 1)],
    [(3, 70, 1), (5, 3, 20)],
)
"""As STEPS, of fewer tokens."""


def rule() -> None:
    """A decay for each value of a key, among them nothing and all there is; rows that have the same bits beside others.

    Odd sizes, ragged prompts and decode steps; states afterwards too.
    """
    compared(partial(ruled, heads=2, dim=12, bound=-5.0, steps=FEW_STEPS, spread=1.0), 1e-5)
    one, *_ = ruled(CUDA, 1, 16, -5.0, [[(3, 0, 70)]], 1.0)
    both, *_ = ruled(CUDA, 1, 16, -5.0, [[(3, 0, 70), (1, 0, 40)]], 1.0)
    assert torch.equal(one, both[:70])


def rules() -> None:
    """More of it, decays without a bound too, and keys that are all alike."""
    for heads, dim, bound, spread in ((3, 6, -5.0, 1.0), (2, 40, None, 1.0), (1, 16, -1.5, 0.05)):
        compared(partial(ruled, heads=heads, dim=dim, bound=bound, steps=STEPS, spread=spread), 1e-5)


def ruled(
    ops: Any, heads: int, dim: int, bound: float | None, steps: Sequence[Sequence[Segment]], spread: float
) -> list[Any]:
    """spread: how far keys differ from one that they have in common."""
    random, width = np.random.default_rng(heads), heads * dim
    rate, bias = -np.exp(random.standard_normal(heads)), random.standard_normal(width)
    net = KimiDelta(heads, dim, *(ops.load_vector(some.astype(np.float32)) for some in (rate, bias)), bound)
    states = states_of(ops, (1, 1), (heads, dim, dim))
    results = []
    for step in steps:
        count = sum(tokens for _, _, tokens in step)
        made = random.standard_normal((count, 4 * width + heads)).astype(np.float32)
        q, k, v, time, share = np.split(made, np.arange(1, 5) * width, axis=1)
        k = k * np.float32(spread) + np.float32(1 - spread)
        time[:, :3] *= 30  # decays of nothing, and of all there is
        both = rows(ops, np.concatenate([time * 2, share * 3], 1))  # rows with gaps between
        sides = ops.columns(both, 0, width), ops.columns(both, width, width + heads)
        results.append(ops.kimi_delta(*(rows(ops, part) for part in (q, k, v)), *sides, net, states, 1, batch_of(step)))
    return [*results, states.delta[1].reshape(NUM_SLOTS, -1)]


HEADS, DIM = 64, 128
"""Of GLM-5.3-Flash."""


def large() -> None:
    """Heads of a real size: ragged prompts and decode steps, and a long prompt of keys that are much alike."""
    for steps, spread in ((STEPS, 1.0), ([[(2, 0, 500)], [(2, 500, 1)]], 0.3)):
        compared(partial(ruled, heads=HEADS, dim=DIM, bound=-5.0, steps=steps, spread=spread), 2e-5)


class Layer:
    """What is timed: sequences of so many tokens after a few others, in states of their own for each copy."""

    def __init__(self, segments: Sequence[int], copies: int) -> None:
        count, total, width = len(segments), sum(segments), HEADS * DIM
        self.states = CUDA.new_states(copies, (1, 1), (HEADS, DIM, DIM), count)
        self.states.delta.normal_()
        self.rows = [torch.randn(total, size, device=DEVICE) for size in (*[width] * 4, HEADS)]
        rate, bias = -torch.rand(HEADS, device=DEVICE), torch.randn(width, device=DEVICE)
        self.net = KimiDelta(HEADS, DIM, rate, bias, -5.0)
        self.batch: Any = to_device(batch_of([(slot, 100, some) for slot, some in enumerate(segments)]), CUDA._device)
        self.num_bytes = 4 * (2 * count * width * DIM + 5 * total * width)

    def rule(self, copy: int) -> Any:
        return CUDA.kimi_delta(*self.rows, self.net, self.states, copy, self.batch)


def times() -> None:
    """Microseconds of a layer at those sizes, and of its bytes alone at 4.3 TB/s; every call has states of its own."""
    for segments in ([1], [1] * 8, [1] * 32, [512], [2048], [256] * 8):
        copies = 24 if sum(segments) < 32 else 4
        layer = Layer(segments, copies)
        took, least = timed(layer.rule, copies), layer.num_bytes / 4.3e6
        print(f"{len(segments)} x {segments[0]}: {took:.1f} us, bytes {least:.1f}", flush=True)


def sweep() -> None:
    """Other columns, warps and stages of a sequence's chunks, and warps of what is summed before."""
    layer, names = Layer([2048], 4), ("CHUNK_VALUES", "CHUNK_WARPS", "CHUNK_STAGES", "SUM_WARPS")
    for values in (
        (32, 4, 3, 8),
        (32, 4, 3, 4),
        (32, 4, 2, 8),
        (32, 4, 1, 8),
        (32, 8, 3, 8),
        (16, 4, 3, 8),
        (64, 8, 2, 8),
    ):
        with ExitStack() as stack:
            for name, value in zip(names, values, strict=True):
                stack.enter_context(changed(kimi, name, value))
            print(f"{values}: {timed(layer.rule, 4):.1f} us", flush=True)


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (rule, rules, large, times, sweep)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
