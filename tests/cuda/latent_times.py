"""Latent attention, the choice of keys and residual streams on a GPU: steps as they are captured, and times.

usage: python -m tests.cuda.latent_times [captured=deepseek_v2,xing4_iq4_nl] [attention] [others]
"""

from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.ops import Projection
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.cuda.attention import Heads
from pocketllm.engine.backends.cuda.layers.latent import attention as latent
from pocketllm.engine.backends.cuda.layers.latent.selection import select_entries
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Matrix, Plain
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch, to_device
from tests.cuda.interpreted import batch_of
from tests.cuda.kernels import timed
from tests.cuda.latent import BLOCK, ORACLES
from tests.cuda.words import asked
from tests.parity.drive import Driver, nmse

RANDOM = np.random.default_rng(0)
GPU = torch.device("cuda")
SHAPES = {"xing4_0": 32, "deepseek-v2-lite": 16, "deepseek-v3": 128}
"""Heads; every one has a latent of 512 values and a key of 64."""
RANK, KEY = 512, 64
SETTINGS = ((32, 4, 3, 256), (32, 4, 3, 128), (32, 4, 3, 512), (32, 4, 2, 256), (64, 8, 3, 256))
"""Keys in a tile, warps, stages, keys in a split of a single row, of which several have twice as many."""


def captured(names: str) -> None:
    """Captured steps against eager ones, repeats, and errors against the oracles."""
    for name in names.split(","):
        expected = np.load(ORACLES / f"{name}.npz")
        ids, logits = expected["input_ids"].tolist(), expected["logits"]
        driver = Driver(ORACLES / f"{name}.gguf", ops=CudaOps())
        [whole] = driver.run([ids], [[(0, len(ids))]])
        by_row = [nmse(row, right) for row, right in zip(whole, logits, strict=True)]
        driver.reset()
        prompts = [ids] * 5
        [*_, last] = driver.run(prompts, [[(s, 20 + s) for s in range(5)], *[[(s, 1) for s in range(5)]] * 3])
        forward: Any = driver.forward
        batch = driver.batch(prompts, [(s, 1) for s in range(5)])
        step = np.array(driver.model.logits(forward(batch)))
        eager = np.array(driver.model.logits(forward.eager(batch)))
        repeats = all(np.array_equal(step, driver.model.logits(forward(batch))) for _ in range(20))
        print(
            f"{name}: prompt {nmse(whole, logits):.1e}, its median row {np.median(by_row):.1e}, above 1e-4 "
            f"{sum(wrong > 1e-4 for wrong in by_row)} rows; steps {nmse(last[-3:], logits[24:27]):.1e}, "
            f"captured = eager {np.array_equal(step, eager)}, 20 repeats identical {repeats}", flush=True,
        )  # fmt: skip


def step_of(streams: int, length: int) -> DeviceBatch:
    """A token more for each of some sequences over scattered blocks."""
    table = RANDOM.permutation(streams * -(-length // BLOCK)).reshape(streams, -1).astype(np.int32)
    return to_device(batch_of(table, np.ones(streams, np.int32), np.full(streams, length - 1)), GPU)


def attention() -> None:
    """Microseconds of a layer's attention in decode steps, beside what its rows take at 4.3 TB/s."""
    pool = torch.randn(1 << 21, RANK + KEY, device=GPU).half()
    for name, heads in SHAPES.items():
        for streams in (1, 8, 32):
            for length in (1, 4096, 32768):
                time_attention(name, LatentAttentionSpec(heads, RANK, KEY, 0.07), pool, streams, length)


def time_attention(name: str, spec: LatentAttentionSpec, pool: torch.Tensor, streams: int, length: int) -> None:
    each = streams * -(-length // BLOCK) * BLOCK
    layers = max(1, min(24, len(pool) // each))
    batch = step_of(streams, length)
    caches = [pool[layer * each :][:each].view(-1, BLOCK, RANK + KEY) for layer in range(layers)]
    q = torch.randn(streams, spec.num_heads * RANK, device=GPU)
    rope = Heads(torch.randn(streams, spec.num_heads * KEY, device=GPU), KEY)
    line = []
    for tile, warps, stages, split in SETTINGS[:1] if length == 1 else SETTINGS:
        latent.TILE, latent.WARPS, latent.STAGES, latent.SPLIT = tile, warps, stages, (split, 2 * split)
        took = timed(lambda i: latent.attend(q, rope, caches[i], batch, spec, None, True), layers)
        line.append(f"{tile}/{warps}/{stages}/{split} {took:.1f}")
    floor = streams * length * (RANK + KEY) * 2 / 4.3e6
    print(f"{name} {streams} x {length}: us {', '.join(line)}; bytes {floor:.1f}, {layers} layers", flush=True)


def others() -> None:
    """A prompt's attention, GLM 5's choice of keys, and xing4_0's residual streams and matrices of heads."""
    time_prompt(2048)
    for streams, length in ((1, 4096), (1, 32768), (8, 32768)):
        time_choice(streams, length)
    for tokens in (1, 8, 32):
        time_streams(tokens)
        time_heads(tokens)


def time_prompt(tokens: int) -> None:
    cache = torch.randn(tokens // BLOCK, BLOCK, RANK + KEY, device=GPU).half()
    table = np.arange(tokens // BLOCK, dtype=np.int32)[None]
    batch = to_device(batch_of(table, np.array([tokens]), np.array([0])), GPU)
    q, rope = torch.randn(tokens, 32 * RANK, device=GPU), Heads(torch.randn(tokens, 32 * KEY, device=GPU), KEY)
    spec = LatentAttentionSpec(32, RANK, KEY, 0.07)
    took = timed(lambda i: latent.attend(q, rope, cache, batch, spec, None, False), 2)
    rate = tokens * tokens * 32 * (2 * RANK + KEY) / took / 1e6
    print(f"a prompt of {tokens}, 32 heads: {took:.0f} us, {rate:.0f} TFLOP/s", flush=True)


def time_choice(streams: int, length: int) -> None:
    keys, batch = torch.randn(streams * length // BLOCK, BLOCK, 128, device=GPU).half(), step_of(streams, length)
    q, weights = torch.randn(streams, 32 * 128, device=GPU), torch.randn(streams, 32, device=GPU)
    took = timed(lambda i: select_entries(q, weights, keys, batch, IndexerSpec(32, 128, 2048), keys.shape[1]), 4)
    print(f"2048 keys chosen, {streams} x {length}: {took:.1f} us", flush=True)


def time_streams(tokens: int) -> None:
    ops, n, hidden = CudaOps(), 4, 3584
    x, y = torch.randn(tokens, n * hidden, device=GPU), torch.randn(tokens, hidden, device=GPU)
    scale, base = torch.randn(3, device=GPU), torch.randn(24, device=GPU)
    matrices = [Matrix(Plain(torch.randn(24, n * hidden, device=GPU).bfloat16())) for _ in range(8)]
    ties = [HyperConnection(Projection(matrix), scale, base, n, 20, 1e-6, 1e-5, 30.0) for matrix in matrices]
    _, shares = ops.read_streams(x, ties[0])
    read = timed(lambda i: ops.read_streams(x, ties[i]), len(ties))
    written = timed(lambda i: ops.write_streams(x, shares, y), len(ties))
    print(f"streams of {tokens} rows: read {read:.1f} us, written {written:.1f}", flush=True)


def time_heads(tokens: int) -> None:
    ops, x = CudaOps(), torch.randn(tokens, 32 * 128, device=GPU)
    into = [ExpertMatrices(Plain(torch.randn(32 * RANK, 128, device=GPU).bfloat16()), 32, RANK, 128) for _ in range(16)]
    print(f"into the latent, {tokens} rows: {timed(lambda i: ops.project_heads(x, into[i]), 16):.1f} us", flush=True)


if __name__ == "__main__":
    for part in asked(__doc__, ["captured", "attention", "others"]):
        kind, _, values = part.partition("=")
        captured(values) if kind == "captured" else {"attention": attention, "others": others}[kind]()
