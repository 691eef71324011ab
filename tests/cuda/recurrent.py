"""Checks of recurrent layers against the reference backend: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.recurrent [convolutions] [rules] [chunks] [rotations] [copies]
           (TRITON_INTERPRET=1 without a GPU)
       python -m tests.cuda.recurrent [large] [times]   (on a GPU)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.cuda.layers.recurrent import layers
from pocketllm.engine.backends.cuda.layers.recurrent.kernels import delta
from pocketllm.engine.backends.cuda.steps.batch import to_device
from tests.cuda.interpreted import rows
from tests.cuda.kernels import timed
from tests.cuda.mixtures import CUDA, DEVICE, REFERENCE, poisoned
from tests.cuda.model import error
from tests.cuda.words import asked

RANDOM = np.random.default_rng(0)
NUM_SLOTS = 7
Segment = tuple[int, int, int]
"""Of a sequence: its slot, tokens that are done, tokens of this step."""
STEPS: tuple[Sequence[Segment], ...] = (
    [(5, 0, 2), (0, 0, 1), (3, 0, 130), (1, 0, 3)],
    [(0, 1, 1), (1, 3, 1), (5, 2, 1)],
    [(3, 130, 1), (6, 0, 64), (5, 3, 67)],
)
"""A ragged prompt, a decode step, and both at once; a sequence's state lies in a slot of its own."""


def batch_of(segments: Sequence[Segment]) -> ForwardBatch:
    counts = [count for _, _, count in segments]
    total = sum(counts)
    return ForwardBatch(
        input_ids=np.zeros(total, np.int32),
        positions=np.concatenate([np.arange(done, done + count) for _, done, count in segments]).astype(np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([done + count for _, done, count in segments], np.int32),
        block_table=np.zeros((len(segments), 1), np.int32),
        slot_mapping=np.zeros(total, np.int64),
        logit_rows=np.zeros(0, np.int32),
        state_slots=np.array([slot for slot, _, _ in segments], np.int32),
    )


@dataclass
class Shape:
    """Heads of a delta rule, and how value heads share key heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def net(self, ops: Any) -> DeltaNet:
        random = np.random.default_rng(self.value_heads)
        rate = ops.load_vector(-np.exp(random.standard_normal(self.value_heads)).astype(np.float32))
        bias = ops.load_vector(random.standard_normal(self.value_heads).astype(np.float32))
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        return DeltaNet(*sizes, self.is_tiled, rate, bias)


def states_of(ops: Any, conv: tuple[int, int], delta: tuple[int, int, int]) -> Any:
    """Slots that hold what must not be read."""
    states = ops.new_states(2, conv, delta, NUM_SLOTS)
    for kept in (*states.conv, *states.delta):
        kept.fill_(torch.nan)
    return states


def compared(run: Callable[[Any], Sequence[Any]], tolerance: float) -> None:
    """Every result of both backends, what is allocated poisoned; the same bits in a second run."""
    with poisoned():
        got, again = ([CUDA.to_numpy(part) for part in run(CUDA)] for _ in range(2))
    for number, (part, other, want) in enumerate(zip(got, again, run(REFERENCE), strict=True)):
        assert np.array_equal(part, other, equal_nan=True), number
        wanted = REFERENCE.to_numpy(want)
        assert np.array_equal(np.isnan(part), np.isnan(wanted)), number
        assert (wrong := error(np.nan_to_num(part), np.nan_to_num(wanted))) < tolerance, (number, wrong)


def convolutions() -> None:
    """Taps, dilations and channels of no whole number of programs; states afterwards too."""
    for channels, taps, dilation, silu in ((40, 4, 1, True), (300, 3, 1, False), (17, 4, 3, True), (40, 2, 2, False)):
        kernel = RANDOM.standard_normal((channels, taps)).astype(np.float32)
        x = [RANDOM.standard_normal((sum(s[2] for s in step), channels)).astype(np.float32) for step in STEPS]

        def run(ops: Any, kernel: Any = kernel, x: Any = x, dilation: int = dilation, silu: bool = silu) -> list[Any]:
            states = states_of(ops, ((kernel.shape[1] - 1) * dilation, kernel.shape[0]), (0, 0, 0))
            own = rows(ops, kernel)
            results = []
            for step, values in zip(STEPS, x, strict=True):
                wide = rows(ops, np.concatenate([values, values], 1))  # rows with gaps between
                own_rows = ops.columns(wide, 0, values.shape[1])
                results.append(ops.causal_conv(own_rows, own, states, 1, batch_of(step), silu, dilation))
            return [*results, states.conv[1].reshape(NUM_SLOTS, -1)]

        compared(run, 1e-6)


def rules() -> None:
    """Ragged prompts and decode steps, heads tiled and grouped, of odd sizes; states afterwards too."""
    for shape in (Shape(2, 6, 5, 7, True), Shape(2, 4, 16, 16, False), Shape(1, 2, 24, 40, True)):
        compared(partial(ruled, shape=shape, steps=STEPS, spread=1.0), 2e-5)


def chunks() -> None:
    """Keys that are all alike, hardly decay and have full shares: what inverting by powers would not survive."""
    compared(partial(ruled, shape=Shape(1, 1, 16, 16, True), steps=[[(2, 0, 150)]], spread=0.05), 2e-5)


def ruled(ops: Any, shape: Shape, steps: Sequence[Sequence[Segment]], spread: float) -> list[Any]:
    """spread: how far rows differ from a common one."""
    random, other = np.random.default_rng(1), np.random.default_rng(2)
    common = random.standard_normal(shape.width)
    net = shape.net(ops)
    states = states_of(ops, (1, 1), (shape.value_heads, shape.key_dim, shape.value_dim))
    results = []
    for step in steps:
        count = sum(tokens for _, _, tokens in step)
        mixed = (common * (1 - spread) + random.standard_normal((count, shape.width)) * spread).astype(np.float32)
        logits = other.standard_normal((count, 2 * shape.value_heads)) * 3
        if spread < 1:  # small time steps, and shares near one
            logits += np.repeat([-6.0, 6.0], shape.value_heads)
        both = rows(ops, logits.astype(np.float32))
        sides = (ops.columns(both, at, at + shape.value_heads) for at in (0, shape.value_heads))
        results.append(ops.gated_delta(rows(ops, mixed), *sides, net, states, 1, batch_of(step)))
    return [*results, states.delta[1].reshape(NUM_SLOTS, -1)]


def rotations() -> None:
    """Blocks from the smallest on, and back again."""
    for block, width in ((1, 3), (2, 6), (16, 48), (128, 256), (1024, 2048)):
        x = RANDOM.standard_normal((3, width)).astype(np.float32)
        signs = np.where(RANDOM.random(width) < 0.5, -1, 1).astype(np.float32)
        for inverse in (False, True):

            def run(ops: Any, x: Any = x, signs: Any = signs, block: int = block, inverse: bool = inverse) -> list[Any]:
                return [ops.hadamard(rows(ops, x), Hadamard(block, ops.load_vector(signs)), inverse)]

            compared(run, 1e-6)


def copies() -> None:
    """One after another: a target may be a later source."""

    def run(ops: Any) -> list[Any]:
        states = states_of(ops, (2, 3), (2, 3, 4))
        for kept in (*states.conv, *states.delta):
            kept.copy_(torch.arange(NUM_SLOTS).reshape(NUM_SLOTS, *[1] * (kept.ndim - 1)).expand(kept.shape))
        ops.copy_states(states, np.array([0, 1, 6], np.int32), np.array([1, 2, 3], np.int32))
        return [kept.reshape(NUM_SLOTS, -1) for kept in (*states.conv, *states.delta)]

    def of_blocks(ops: Any) -> list[Any]:
        caches = ops.new_kv_cache(2, 2, 4, 6, NUM_SLOTS, 3), ops.new_latent_cache(2, 5, NUM_SLOTS, 3)
        layers = [*caches[0].keys, *caches[0].values, *caches[1].rows]
        for number, kept in enumerate(layers):
            kept.copy_(number + torch.arange(kept.numel()).reshape(kept.shape))
        for cache in caches:
            ops.copy_blocks(cache, np.array([0, 1, 6], np.int32), np.array([1, 2, 3], np.int32))
        return [kept.reshape(NUM_SLOTS, -1) for kept in layers]

    compared(run, 1e-9)
    compared(of_blocks, 1e-9)


LARGE = Shape(16, 48, 128, 128, True)
"""Heads of Qwen3.5-27B."""


def large() -> None:
    """Heads of a real size: ragged prompts and decode steps, and rows that have the same bits beside others."""
    compared(partial(ruled, shape=LARGE, steps=STEPS, spread=1.0), 2e-5)
    compared(partial(ruled, shape=LARGE, steps=[[(2, 0, 1000)], [(2, 1000, 1)]], spread=0.3), 2e-4)
    one, *_ = ruled(CUDA, LARGE, [[(3, 0, 130)]], 1.0)
    both, *_ = ruled(CUDA, LARGE, [[(3, 0, 130), (1, 0, 70)]], 1.0)
    assert torch.equal(one, both[:130])


def times() -> None:
    """Microseconds of a layer at those sizes, and of its bytes alone at 4.3 TB/s; every call has states of its own."""
    for segments in ([1], [1] * 8, [1] * 32, [512], [2048], [256] * 8):
        copies = 24 if sum(segments) < 32 else 4
        layer = Layer(segments, copies)
        for name, run, num_bytes in layer.parts():
            took = timed(run, copies)
            print(
                f"{name} of {len(segments)} x {segments[0]}: {took:.1f} us, bytes {num_bytes / 4.3e6:.1f}", flush=True
            )
        if segments[0] > 1:
            sweep(layer, copies)
    for count in (1, 2048):
        x, signs = torch.randn(count, 5120, device=DEVICE), torch.ones(5120, device=DEVICE)
        took = timed(lambda _, x=x, signs=signs: CUDA.hadamard(x, Hadamard(1024, signs)), 8)
        print(f"rotation of {count} x 5120: {took:.1f} us, bytes {8 * x.numel() / 4.3e6:.1f}", flush=True)


def sweep(layer: "Layer", copies: int) -> None:
    """Other columns and warps of a sequence's chunks."""
    for values, warps, solving in ((32, 4, 4), (32, 4, 8), (64, 8, 4), (64, 4, 4), (128, 8, 4)):
        named = {"CHUNK_VALUES": values, "CHUNK_WARPS": warps, "SOLVE_WARPS": solving}
        with ExitStack() as stack:
            for name, value in named.items():
                stack.enter_context(changed(layers, name, value))
            print(f"    {values} {warps} {solving}: {timed(layer.rule, copies):.1f} us", flush=True)
        with changed(layers, "SOLVE_WARPS", solving), without(delta, "states_kernel"):
            print(f"    without its states: {timed(layer.rule, copies):.1f} us", flush=True)


@contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    """A constant of a module's launches at another value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def without(kernels: Any, left_out: str) -> Iterator[None]:
    """A layer without one of its launches."""
    kernel = getattr(kernels, left_out)
    setattr(kernels, left_out, defaultdict(lambda: lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(kernels, left_out, kernel)


class Layer:
    """What is timed: sequences of so many tokens after a few others, in states of their own for each copy."""

    def __init__(self, segments: Sequence[int], copies: int) -> None:
        channels, total, count = LARGE.width, sum(segments), len(segments)
        self.states = CUDA.new_states(copies, (3, channels), (48, 128, 128), count)
        for kept in (*self.states.conv, *self.states.delta):
            kept.normal_()
        self.x, self.kernel = torch.randn(total, channels, device=DEVICE), torch.randn(channels, 4, device=DEVICE)
        self.step, self.share = (torch.randn(total, 48, device=DEVICE) for _ in range(2))
        self.net = LARGE.net(CUDA)
        self.batch: Any = to_device(batch_of([(slot, 100, some) for slot, some in enumerate(segments)]), CUDA._device)
        self.states_bytes, self.rows_bytes = count * 2 * 4 * 48 * 128 * 128, total * 4 * (channels + 48 * 128)
        self.conv_bytes = total * 8 * channels + count * 24 * channels

    def conv(self, copy: int) -> Any:
        return CUDA.causal_conv(self.x, self.kernel, self.states, copy, self.batch, True)

    def rule(self, copy: int) -> Any:
        return CUDA.gated_delta(self.x, self.step, self.share, self.net, self.states, copy, self.batch)

    def parts(self) -> Sequence[tuple[str, Callable[[int], Any], int]]:
        return ("convolution", self.conv, self.conv_bytes), ("rule", self.rule, self.states_bytes + self.rows_bytes)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (convolutions, rules, chunks, rotations, copies, large, times)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
