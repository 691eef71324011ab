"""What this machine can do at most, as far as a process can see: read memory, and multiply matrices."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

READ_BYTES = 256 << 20
"""Read at once by all threads together: more than any cache of a CPU in use today holds for one process."""
MATMUL_SIZE = 1536
BEST_OF = 5


@dataclass(frozen=True)
class Ceilings:
    """Best of a few tries, so that a disturbed one does not lower a ceiling; GB and GFLOP are 10⁹."""

    read_gbs: float
    """float32 dot products of arrays far larger than the caches, all threads at once."""
    matmul_gflops: float
    """float32 matrix product of numpy's BLAS, all its threads."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_ceilings(threads: int) -> Ceilings:
    """Both ceilings, in about a second. threads: as many as the engine uses."""
    return Ceilings(READ_BYTES / best_s(reader(threads)) / 1e9, 2 * MATMUL_SIZE**3 / best_s(multiplier()) / 1e9)


def reader(threads: int) -> Callable[[], object]:
    """A call that reads READ_BYTES once."""
    parts = [np.ones(READ_BYTES // 4 // threads, np.float32) for _ in range(threads)]
    # numpy lets go of the interpreter while it multiplies, so that the threads read at once
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.dot(part, part), parts))


def multiplier() -> Callable[[], object]:
    """A call that multiplies two square matrices."""
    left, right = (np.full((MATMUL_SIZE, MATMUL_SIZE), value, np.float32) for value in (0.5, 0.25))
    return lambda: left @ right


def best_s(call: Callable[[], object]) -> float:
    """Seconds of the quickest of BEST_OF calls, after one that does not count."""
    call()
    times = []
    for _ in range(BEST_OF):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
