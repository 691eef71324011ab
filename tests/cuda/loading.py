"""How fast weights reach a GPU, beside what its bus and the host's page cache give.

usage: python -m tests.cuda.loading FILE [FILE …]   (checkpoints of a family that the backend runs)
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch

from pocketllm.bench.probes import page_cache
from pocketllm.engine.backends.cuda.matrices.uploads import being_copied
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.cuda.words import refuse

PIECE, TURNS, CONTEXT = 256 << 20, 5, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished() -> float:
    """The time when the device has done all it was asked for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def cache_gbs(file: Path) -> float:
    """Bytes of a file in the page cache to pinned memory, by as many threads as load it; GB/s, the best of some."""
    data, best = np.memmap(file, np.uint8, "r"), 0.0
    size = min(PIECE, len(data))
    for turn in range(TURNS):
        at = turn * size % max(1, len(data) - size)
        start = time.perf_counter()
        for copy in being_copied(data[at : at + size], DEVICE).copies:
            copy.result()
        best = max(best, size / (time.perf_counter() - start) / 1e9)
    return best


def bus_gbs() -> float:
    """Pinned memory to the device; GB/s, the best of some."""
    memory, best = being_copied(np.zeros(PIECE, np.uint8), DEVICE), 0.0
    memory.sent(DEVICE)
    for _ in range(TURNS):
        start = finished()
        memory.sent(DEVICE)
        best = max(best, PIECE / (finished() - start) / 1e9)
    return best


def load_s(file: Path) -> float:
    """Seconds from an open file to weights that can be multiplied; its header has been read."""
    checkpoint = open_checkpoint(file)
    family, ops = find_family(checkpoint.architecture), CudaOps(device=str(DEVICE))
    start = finished()
    model = family.load(checkpoint, ops, max_model_len=CONTEXT)
    took = finished() - start
    del model
    return took


def main() -> None:
    files = [Path(word) for word in sys.argv[1:]]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        refuse(__doc__, f"no such file: {', '.join(missing)}" if missing else "no file is named")
    for file in files:
        page_cache.read_through(file)
        size = file.stat().st_size / 1e9
        cache, bus = cache_gbs(file), bus_gbs()
        for turn in ("first", "again"):
            took = load_s(file)
            share = size / took / min(cache, bus)
            print(
                f"{file.name} {turn}: {size:.2f} GB in {took:.2f} s, {size / took:.2f} GB/s, {share:.0%} of the slower"
                f" of page cache {cache:.1f} GB/s and bus {bus:.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
