"""How fast weights reach a GPU, beside what its bus and the host's page cache give.

usage: python -m tests.cuda.loading [profile] FILE [FILE …]   (checkpoints of a family that the backend runs)

profile: says after the rates where time goes: what the loading thread waits for and calls, the threads that read, and
what the device is busy with.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch

from pocketllm.bench.probes import page_cache
from pocketllm.engine.backends.cuda.matrices.uploads import PIECE_BYTES, Array, Source, new_memory, read, readers, spans
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.tensor_file import Stored, TensorFile
from tests.cuda.loading_profile import profile
from tests.cuda.words import refuse

SAMPLE, TURNS, CONTEXT = 256 << 20, 5, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished() -> float:
    """The time when the device has done all it was asked for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def cache_gbs(file: Path) -> tuple[float, float]:
    """Bytes of a file in the page cache to pinned memory, by the threads that load it: read, and copied from a map."""
    size = file.stat().st_size
    return rate(Stored(TensorFile(file), "all", 0, size), size), rate(Array(np.memmap(file, np.uint8, "r")), size)


def rate(source: Source, size: int, pool: ThreadPoolExecutor | None = None) -> float:
    """GB/s, the best of some; pool: other threads than those that load."""
    sample, best = min(SAMPLE, size), 0.0
    for turn in range(TURNS):
        at = turn * sample % max(1, size - sample)
        start = time.perf_counter()
        parts = spans(sample, PIECE_BYTES)
        found = [
            (pool or readers()).submit(read, source, at + first, end - first, DEVICE.type == "cuda")
            for first, end in parts
        ]
        wait(found)
        best = max(best, sample / (time.perf_counter() - start) / 1e9)
    return best


def scaling(file: Path) -> str:
    """What other numbers of threads read."""
    size, found = file.stat().st_size, []
    for count in (1, 2, 4, 8, 16, 32):
        with ThreadPoolExecutor(count) as pool:
            found.append(f"{count}: {rate(Stored(TensorFile(file), 'all', 0, size), size, pool):.1f}")
    return f"GB/s read by so many threads: {', '.join(found)}"


def bus_gbs() -> float:
    """Pinned memory to the device; GB/s, the best of some."""
    memory, best = new_memory(SAMPLE, DEVICE.type == "cuda"), 0.0
    target = torch.empty(SAMPLE, dtype=torch.uint8, device=DEVICE)
    for _ in range(TURNS):
        start = finished()
        target.copy_(memory, non_blocking=True)
        best = max(best, SAMPLE / (finished() - start) / 1e9)
    return best


def loader_of(file: Path) -> Callable[[], float]:
    """What loads a file whose header has been read, until its weights can be multiplied, and says the seconds."""
    checkpoint = open_checkpoint(file)
    family = find_family(checkpoint.architecture)

    def load() -> float:
        ops = CudaOps(device=str(DEVICE))
        start = finished()
        model = family.load(checkpoint, ops, max_model_len=CONTEXT)
        ops.synchronize()
        took = finished() - start
        del model
        return took

    return load


def main() -> None:
    words = sys.argv[1:]
    files = [Path(word) for word in words if word != "profile"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        refuse(__doc__, f"no such file: {', '.join(missing)}" if missing else "no file is named")
    for file in files:
        page_cache.read_through(file)
        size, load = file.stat().st_size / 1e9, loader_of(file)
        # before any other pinned memory was asked for, which torch keeps: an engine that starts has none
        first = load()
        (was_read, mapped), bus = cache_gbs(file), bus_gbs()
        cache = max(was_read, mapped)
        for turn, took in (("first, kernels may be compiled", first), ("again", load()), ("again", load())):
            print(
                f"{file.name} {turn}: {size:.2f} GB in {took:.3f} s, {size / took:.2f} GB/s, "
                f"{size / took / min(cache, bus):.0%} of the slower of page cache {cache:.1f} GB/s (read "
                f"{was_read:.1f}, mapped {mapped:.1f}) and bus {bus:.1f} GB/s",
                flush=True,
            )
        if "profile" in words:
            print(scaling(file), flush=True)
            profile(load)


if __name__ == "__main__":
    main()
