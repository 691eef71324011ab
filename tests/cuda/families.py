"""Tiny checkpoints of families on the CUDA backend, held to their oracles: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.families NAME[:TOKENS] …   (TRITON_INTERPRET=1 without a GPU)
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.parity import gemma4_oracle, recurrent_oracle, transformers_families
from tests.parity.drive import Driver, Step, nmse
from tests.parity.folded import write_folded
from tests.parity.tiny_families import write_family

ORACLES = Path(__file__).parents[1] / "oracles"
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE, ROUNDED = 1e-9, 1e-5
"""Of the squared size of logits: of files of plain floats, which nothing rounds, and of packed ones."""


def checkpoint(name: str, work: Path) -> Path:
    """The committed one, or one that is made again from its seed."""
    committed, path = ORACLES / f"{name}.gguf", work / f"{name}.gguf"
    if name.startswith("folded_"):
        return write_folded(path, name.removeprefix("folded_"))
    specs = {**transformers_families.SPECS, **recurrent_oracle.SPECS, **gemma4_oracle.SPECS}
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
    got = driver.run([ids, ids], steps_of(count))
    return max(nmse(part, logits[: len(part)]) for part in got)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[1:]:
        name, _, count = word.partition(":")
        start = time.perf_counter()
        wrong = check(name, int(count or 12))
        print(f"{name} {wrong:.1e} {time.perf_counter() - start:.1f} s", flush=True)
        assert wrong < (ROUNDED if name.startswith("folded_") else TOLERANCE), name
        print(name, "agrees", flush=True)
