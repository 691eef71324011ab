"""Five sequences of a family's oracle at once on the CUDA backend: prompts in one step, then tokens one by one.

On a GPU, where steps are graphs, or in Triton's interpreter, where steps of single tokens have the spare places of one
and memory holds what must not be read; with the cache in float32 and in float16.

usage: python -m tests.cuda.together NAME[:TOKENS] …   (18 or more of them; TRITON_INTERPRET=1 without a GPU)
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.families import DEVICE, ORACLES, ROUNDED, TOLERANCE, checkpoint
from tests.cuda.mixtures import poisoned
from tests.cuda.model import in_spare_places
from tests.cuda.words import asked
from tests.parity.drive import Driver, Step, nmse

DECODED = 4
"""Tokens of each sequence that come one by one."""
HALF = 1e-5
"""Of the squared size of the median row: some rows have another key or expert (decision 25), most have not."""


def steps_of(counts: list[int]) -> list[Step]:
    """The sequences are one after another in the first step, and in another order in the others."""
    prompts = [(sequence, count - DECODED) for sequence, count in enumerate(counts)]
    return [prompts, *[[(sequence, 1) for sequence in (3, 0, 4, 2, 1)]] * DECODED]


def check(path: Path, name: str, count: int, kv_dtype: str) -> None:
    """Errors of all rows, of those that came one by one, and of the median row."""
    expected, start = np.load(ORACLES / f"{name}.npz"), time.perf_counter()
    ids, logits = expected["input_ids"].tolist()[:count], expected["logits"].astype(np.float64)
    counts = [count, count // 2, DECODED + 1, count // 3, DECODED + 2]
    driver = Driver(path, ops=cast(Ops, CudaOps(kv_dtype, DEVICE)))
    with poisoned() if DEVICE == "cpu" else nullcontext():
        if DEVICE == "cpu":
            driver.forward = with_spare_places(driver.forward)
        got = driver.run([ids[:some] for some in counts], steps_of(counts))
    rows = [nmse(row, logits[at]) for part in got for at, row in enumerate(part)]
    whole, late = (worst(got, logits, first) for first in (0, -DECODED))
    print(
        f"{name} {kv_dtype}: {whole:.1e}, one by one {late:.1e}, median row {np.median(rows):.1e}, "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    assert np.median(rows) < HALF, (name, kv_dtype)
    if kv_dtype == "float32":
        assert whole < (ROUNDED if DEVICE == "cuda" else TOLERANCE), (name, whole)


def with_spare_places(captured: Any) -> Callable[[ForwardBatch], Any]:
    """A forward whose decode steps are as a graph would have them."""
    return lambda batch: in_spare_places(captured, batch) if batch.is_single else captured(batch)


def worst(got: list[Any], logits: Any, first: int) -> float:
    """The largest error of a sequence's rows from `first` on."""
    return max(nmse(part[first:], logits[: len(part)][first:]) for part in got)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in asked(__doc__, sorted(path.stem for path in ORACLES.glob("*.npz"))):
        name, _, count = word.partition(":")
        with TemporaryDirectory() as work:
            path = checkpoint(name, Path(work))
            for kv_dtype in ("float32", "float16"):
                check(path, name, int(count or 72), kv_dtype)
        print(name, "agrees", flush=True)
