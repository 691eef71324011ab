"""Run by an emulated aarch64 Python that has numpy alone: tiny checkpoints through the native backend, to a file.

Arguments: the file to write, then a checkpoint each.
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.cpu.library import usable_isas
from pocketllm.engine.backends.cpu.ops import CpuOps
from tests.parity.drive import Driver, chunks

PROMPT = np.random.default_rng(11).integers(0, 512, 40).tolist()
DTYPES = {
    "float32": {"activation_dtype": "float32", "kv_dtype": "float32"},
    "int16": {"activation_dtype": "int16", "kv_dtype": "float32"},
    "int8": {},
}


def logits(path: Path, isa: str, dtype: str) -> npt.NDArray[np.float32]:
    """Of every position of one prompt: a chunk, then single tokens, on two threads."""
    driver = Driver(path, ops=CpuOps(2, isa=isa, **DTYPES[dtype]))
    return driver.run([PROMPT], [*chunks(36, 36), *chunks(4, 1)])[0]


if __name__ == "__main__":
    out, *paths = sys.argv[1:]
    runs = [(Path(path), isa, dtype) for path in paths for isa in usable_isas() for dtype in DTYPES]
    np.savez(out, **{f"{path.stem} {isa} {dtype}": logits(path, isa, dtype) for path, isa, dtype in runs})
