"""Checks of latent attention and of residual streams against the reference: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.latent [heads] [attention] [selection] [pools] [streams]
           [oracles=deepseek_v2,xing4_f32]
           (TRITON_INTERPRET=1 without a GPU)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.cuda.layers.latent import attention as cuda_latent
from pocketllm.engine.backends.cuda.layers.latent import selection as cuda_selection
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.interpreted import batch_of, rows
from tests.cuda.mixtures import DEVICE, compared, matrices
from tests.cuda.words import asked
from tests.parity.drive import Driver, nmse

RANDOM = np.random.default_rng(0)
ORACLES = Path(__file__).parents[1] / "oracles"
BLOCK = 16


def normal(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def heads() -> None:
    """Rows through matrices of heads, plain and packed: one row, a few and many."""
    for kind, cols in (("F32", 20), ("BF16", 40), ("Q8_0", 64), ("Q4_K", 256)):
        data, x = matrices(kind, 3, 24, cols), normal(40, 3 * cols)
        for tokens in {"F32": (3,), "Q4_K": (1,)}.get(kind, (1, 3, 40)):

            def through(ops: Any, x: Any = x[:tokens], data: Any = data, kind: str = kind) -> Any:
                cols = x.shape[1] // 3
                return ops.project_heads(rows(ops, x), ops.load_experts(data, kind, (3, 24, cols)))

            assert (wrong := compared(through, twice=True)) < 1e-3, (kind, tokens, wrong)


class Step:
    """Sequences of one token and of more over scattered blocks, with what was cached before; blocks of others hold
    infinities."""

    def __init__(self, spec: LatentAttentionSpec, tokens: int) -> None:
        self.spec = spec
        lengths, counts = np.array([90, 3, 1, tokens + 4], np.int32), np.array([1, 3, 1, tokens], np.int32)
        numbers = -(-lengths // BLOCK)
        places = iter(RANDOM.permutation(40).tolist())
        table = np.full((4, numbers.max()), -1, np.int32)
        for row, number in enumerate(numbers):
            table[row, :number] = [next(places) for _ in range(number)]
        self.others = list(places)
        self.batch, self.history = batch_of(table, counts, lengths - counts), batch_of(table, lengths, 0 * lengths)
        self.latent, self.key = normal(lengths.sum(), spec.rank), normal(lengths.sum(), max(spec.rope_dim, 1))
        self.q_latent = normal(counts.sum(), spec.num_heads * spec.rank)
        self.q_rope = normal(counts.sum(), max(spec.num_heads * spec.rope_dim, 1))

    def attended(self, ops: Any) -> Any:
        spec = self.spec
        cache = ops.new_latent_cache(2, spec.rank + spec.rope_dim, 40, BLOCK)
        cache.rows[1][self.others] = float("inf")
        parts, q_rope = [rows(ops, self.latent)], rows(ops, self.q_rope)[:, : spec.num_heads * spec.rope_dim]
        if spec.rope_dim:
            freq = ops.load_vector((10000.0 ** (-np.arange(spec.rope_dim // 2) / 3)).astype(np.float32))
            dim, layout = spec.rope_dim, RopeLayout.ADJACENT
            parts.append(ops.rope(rows(ops, self.key), ops.rope_angles(freq, self.history.positions, 1.2), dim, layout))
            q_rope = ops.rope(q_rope, ops.rope_angles(freq, self.batch.positions, 1.2), dim, layout)
        ops.store_latent(cache, 1, self.history, *parts)
        assert not cache.rows[0].any()
        return ops.latent_attention(rows(ops, self.q_latent), q_rope, cache, 1, self.batch, spec)


def attention() -> None:
    """One step over scattered blocks, in one split and in several; few heads and many; where nothing rotates."""
    for spec, tokens, split in (
        (LatentAttentionSpec(5, 20, 8, 0.21), 66, (8, 8)),
        (LatentAttentionSpec(17, 16, 6, 0.1), 6, (256, 256)),
        (LatentAttentionSpec(1, 16, 0, 0.3), 20, (32, 32)),
    ):
        cuda_latent.SPLIT, cuda_latent.MOST_SPLITS, cuda_latent.MERGED_AT_ONCE = split, (3, 7), 2
        assert (wrong := compared(Step(spec, tokens).attended, twice=split[0] < 256)) < 1e-5, (spec, split, wrong)


def selection() -> None:
    """The best keys of each token, many of them equal, are those that the reference attends; all where they are few."""
    step, index = Step(LatentAttentionSpec(5, 20, 0, 0.21), 20), IndexerSpec(3, 8, 17)
    counts = len(step.history.positions), len(step.batch.positions)
    keys, q, weights = (
        RANDOM.integers(-2, 3, shape).astype(np.float32)
        for shape in ((counts[0], 8), (counts[1], 3 * 8), (counts[1], 3))
    )
    cuda_selection.CHUNK, cuda_selection.SCORES_AT_ONCE = 32, 1 << 13

    def attended(ops: Any) -> Any:
        cache, own = ops.new_latent_cache(1, 8, 40, BLOCK), ops.new_latent_cache(1, 20, 40, BLOCK)
        ops.store_latent(cache, 0, step.history, rows(ops, keys))
        ops.store_latent(own, 0, step.history, rows(ops, step.latent))
        selected = ops.select_keys(rows(ops, q), rows(ops, weights), cache, 0, step.batch, index)
        q_rope = rows(ops, step.q_rope)[:, :0]
        return ops.latent_attention(rows(ops, step.q_latent), q_rope, own, 0, step.batch, step.spec, selected)

    assert (wrong := compared(attended, twice=True)) < 1e-5, wrong
    bias = normal(20)
    normed = compared(
        lambda ops: ops.layer_norm(rows(ops, step.latent), Norm(ops.load_vector(bias), 1e-5), ops.load_vector(bias))
    )
    assert normed < 1e-6, normed


def pools() -> None:
    """Tokens of the best groups, many of them equal, and those after the last whole one; groups that end within blocks
    and beyond, more of them than a token takes, and fewer."""
    cuda_selection.CHUNK, cuda_selection.SCORES_AT_ONCE = 32, 1 << 7
    for ratio, best, tokens in ((4, 3, 20), (3, 30, 9), (5, 1, 6)):
        step, index = Step(LatentAttentionSpec(5, 20, 0, 0.21), tokens), IndexerSpec(3, 8, best)
        count, per_block = len(step.batch.positions), -(-BLOCK // ratio)
        keys, q, weights = (
            RANDOM.integers(-2, 3, shape).astype(np.float32) for shape in ((40, per_block * 8), (count, 24), (count, 3))
        )

        def attended(ops: Any, of: Any = (ratio, step, index, keys, q, weights)) -> Any:
            ratio, step, index, keys, q, weights = of
            cache, own = ops.new_compressed_cache(2, 8, ratio, 40, BLOCK), ops.new_latent_cache(1, 20, 40, BLOCK)
            cache.rows[1].copy_(rows(ops, keys).view(cache.rows[1].shape))
            ops.store_latent(own, 0, step.history, rows(ops, step.latent))
            selected = ops.select_pools(rows(ops, q), rows(ops, weights), cache, 1, step.batch, index)
            q_rope = rows(ops, step.q_rope)[:, :0]
            return ops.latent_attention(rows(ops, step.q_latent), q_rope, own, 0, step.batch, step.spec, selected)

        assert (wrong := compared(attended, twice=True)) < 1e-5, (ratio, best, wrong)


def streams() -> None:
    """Three streams and four, read and written by both kinds of connection, and read by the head; few rows and many."""
    for n, hidden, kind, tokens in ((4, 40, "F32", 2), (3, 24, "BF16", 1), (4, 8, "Q8_0", 34)):
        shares = n * (2 + n)
        data, x, y = matrices(kind, 1, shares, n * hidden), normal(tokens, n * hidden), normal(tokens, hidden)
        scale, base = normal(3), normal(shares)
        first = matrices("F32", 1, n, n * hidden)

        def both(
            ops: Any, n: int = n, hidden: int = hidden, kind: str = kind, of: Any = (data, x, y, scale, base, first)
        ) -> Any:
            data, x, y, scale, base, first = of
            weight = Projection(ops.load_matrix(data, kind, (len(base), n * hidden)))
            vectors = ops.load_vector(scale), ops.load_vector(base)
            hyper = HyperConnection(weight, *vectors, n, 3, 1e-2, 1e-5, clamp=0.5)
            soft = SoftConnection(weight, *vectors, n, 3, 1e-2, 1e-5)
            head = SoftConnection(
                Projection(ops.load_matrix(first, "F32", (n, n * hidden))), ops.load_vector(scale[:1]),
                ops.load_vector(base[:n]), n, 0, 1e-2, 1e-5,
            )  # fmt: skip
            found, own = ops.read_streams(rows(ops, x), hyper)
            own_streams = ops.write_streams(rows(ops, x), own, ops.add(found, rows(ops, y)))
            found, own = ops.read_soft_streams(own_streams, soft)
            own_streams = ops.write_streams(own_streams, own, found)
            last, nothing = ops.read_soft_streams(own_streams, head)
            assert nothing.shape == (len(x), 0)
            both_ends = ops.add(last, ops.mean_streams(own_streams, n))
            return ops.write_streams(ops.open_streams(both_ends, n), own, last)

        assert (wrong := compared(both, twice=True)) < (1e-3 if kind == "Q8_0" else 1e-5), (n, kind, tokens, wrong)


def oracles(names: str) -> None:
    """Committed oracles of tiny models: prompts and single tokens, each sequence alone and beside another."""
    for name in names.split(","):
        driver = Driver(ORACLES / f"{name}.gguf", ops=CudaOps("float32" if DEVICE == "cpu" else "float16", DEVICE))
        expected = np.load(ORACLES / f"{name}.npz")
        ids, logits = expected["input_ids"].tolist(), expected["logits"]
        [whole, some] = driver.run([ids, ids], [[(0, 20), (1, 3)], [(0, 1), (1, 1)], [(1, 16)], [(1, 1)]])
        # rows that meet packed weights have sixteen bits, and cached ones on a GPU ten
        bar = 1e-9 if DEVICE == "cpu" and "iq4" not in name else 1e-5
        for got, count in ((whole, 21), (some, 21)):
            assert (wrong := nmse(got, logits[:count])) <= bar, (name, wrong)


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (heads, attention, selection, pools, streams)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in asked(__doc__, [*PARTS, "oracles"]):
        name, _, values = part.partition("=")
        oracles(values) if name == "oracles" else PARTS[name]()
        print(part, "agrees", flush=True)
