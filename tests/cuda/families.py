"""Tiny checkpoints of families on the CUDA backend, held to their oracles: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.families NAME[:TOKENS] …   (TRITON_INTERPRET=1 without a GPU)
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.words import asked
from tests.parity import deepseek4_oracle, gemma4_oracle, glm5_next_oracle, recurrent_oracle, transformers_families
from tests.parity.drive import Driver, Step, nmse
from tests.parity.folded import write_folded
from tests.parity.tiny_families import write_family

ORACLES = Path(__file__).parents[1] / "oracles"
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE, ROUNDED = 1e-9, 3e-5
"""Of the squared size of logits: where nothing is rounded, and where rows of packed matrices are, or by a GPU's tensor
cores queries, keys and values."""


def checkpoint(name: str, work: Path) -> Path:
    """The committed one, or one that is made again from its seed."""
    committed, path = ORACLES / f"{name}.gguf", work / f"{name}.gguf"
    if name.startswith("folded_"):
        return write_folded(path, name.removeprefix("folded_"))
    oracles = transformers_families, recurrent_oracle, gemma4_oracle, glm5_next_oracle, deepseek4_oracle
    specs = {key: spec for oracle in oracles for key, spec in oracle.SPECS.items()}
    return committed if committed.exists() else write_family(path, specs[name])


def steps_of(count: int) -> list[Step]:
    """Two sequences: a prompt and a token beside it, a piece of more and a token, both a token, one alone a token."""
    return [[(0, count - 4), (1, 1)], [(0, 2), (1, 2)], [(1, 1), (0, 1)], [(0, 1)]]


def check(name: str, count: int) -> float:
    """The larger error of two sequences that begin alike."""
    expected = np.load(ORACLES / f"{name}.npz")
    ids, logits = expected["input_ids"].tolist()[:count], expected["logits"]
    with TemporaryDirectory() as work:
        driver = Driver(checkpoint(name, Path(work)), ops=cast(Ops, CudaOps("float32", DEVICE)))
    got = driver.run([ids, ids], steps_of(len(ids)))
    if DEVICE == "cuda":
        check_graphs(driver, ids)
    return max(nmse(part, logits[: len(part)]) for part in got)


def check_graphs(driver: Driver, ids: list[int]) -> None:
    """Steps as graphs, the same replayed for other sequences, and eager ones give the same bits."""
    captured: Any = driver.forward
    first, again, eager = (
        ends(driver, ids, sequences, forward)
        for sequences, forward in (((2, 3), captured), ((4, 5), captured), ((6, 7), captured.eager))
    )
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True)), "replayed"
    assert all(np.array_equal(one, other) for one, other in zip(first, eager, strict=True)), "eager"


def ends(driver: Driver, ids: list[int], sequences: tuple[int, int], forward: Any) -> list[Any]:
    """Logits of the last token of each sequence in each step."""
    found = []
    for step in steps_of(len(ids)):
        batch = driver.batch([ids] * 8, [(sequences[which], some) for which, some in step])
        hidden = forward(replace(batch, logit_rows=batch.query_start_loc[1:] - 1))
        found.append(np.array(driver.model.logits(hidden)))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in asked(__doc__, sorted(path.stem for path in ORACLES.glob("*.npz"))):
        name, _, count = word.partition(":")
        start = time.perf_counter()
        wrong = check(name, int(count or 12))
        print(f"{name} {wrong:.1e} {time.perf_counter() - start:.1f} s", flush=True)
        assert wrong < (ROUNDED if DEVICE == "cuda" or name.startswith("folded_") else TOLERANCE), name
        print(name, "agrees", flush=True)
