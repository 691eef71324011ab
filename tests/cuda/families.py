"""Tiny checkpoints of families on the CUDA backend, held to their oracles: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.families NAME[:TOKENS] …   (TRITON_INTERPRET=1 without a GPU)
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.parity.drive import Driver, Step, nmse

ORACLES = Path(__file__).parents[1] / "oracles"
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = 1e-9
"""Of the squared size of logits; these files are of plain floats, which nothing rounds."""


def steps_of(count: int) -> list[Step]:
    """Two sequences: a prompt and a token beside it, a piece of more and a token, both a token, one alone a token."""
    return [[(0, count - 4), (1, 1)], [(0, 2), (1, 2)], [(1, 1), (0, 1)], [(0, 1)]]


def check(name: str, count: int) -> float:
    """The larger error of two sequences that begin alike."""
    expected = np.load(ORACLES / f"{name}.npz")
    ids, logits = expected["input_ids"].tolist()[:count], expected["logits"]
    driver = Driver(ORACLES / f"{name}.gguf", ops=CudaOps("float32", DEVICE))
    got = driver.run([ids, ids], steps_of(count))
    return max(nmse(part, logits[: len(part)]) for part in got)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[1:]:
        name, _, count = word.partition(":")
        start = time.perf_counter()
        wrong = check(name, int(count or 12))
        print(f"{name} {wrong:.1e} {time.perf_counter() - start:.1f} s", flush=True)
        assert wrong < TOLERANCE, name
        print(name, "agrees", flush=True)
