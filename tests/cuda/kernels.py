"""Every quant type's matrix-vector kernel against float64, and its rate on shapes of an 8B model.

usage: python -m tests.cuda.kernels [check] [time] [TYPE …]
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.kernels import gemv
from pocketllm.engine.backends.cuda.layouts import LAYOUTS
from pocketllm.engine.backends.cuda.packing import Packed, unpack
from pocketllm.engine.weights.quant_types import BY_NAME
from tests.cuda.synthetic import HALVES

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
GPU = torch.device("cuda")


def random_matrix(quant_type: str, rows: int, cols: int, seed: int = 0) -> Packed:
    kind = BY_NAME[quant_type]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, cols // kind.block_elements, kind.block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant_type, ()):
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if quant_type == "MXFP4":
        data[..., 0] = random.integers(118, 126, data.shape[:2])
    held = matrices.load(data, quant_type, (rows, cols), GPU).held
    assert isinstance(held, Packed)
    return held


def random_rows(count: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(-127, 128, (count, cols), dtype=torch.int8, device=GPU)
    return x.view(torch.int32), torch.rand(count, cols // 32, device=GPU)


def timed(run: Callable[[int], None], copies: int) -> float:
    """Microseconds of one call, captured over `copies` of its weights and replayed."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            run(copy)
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / copies)
    return sorted(times)[3] * 1e3


def check() -> None:
    for quant_type in [name for name in LAYOUTS if name in sys.argv] or LAYOUTS:
        errors, same = [], True
        for rows, cols in ((70, 512),):
            packed = random_matrix(quant_type, rows, cols)
            x8, scale = random_rows(8, cols)
            x = x8.view(torch.int8).view(8, -1, 32).double() * scale[:, :, None]
            want = x.view(8, cols) @ unpack(packed).double().T
            single = torch.full((8, rows), torch.nan, device=GPU)
            for row in range(8):
                gemv.multiply(x8[row : row + 1], scale[row : row + 1], packed, single[row : row + 1])
            for count in (2, 3, 5, 8):
                y = torch.full((count, rows), torch.nan, device=GPU)
                gemv.multiply(x8[:count], scale[:count], packed, y)
                same &= torch.equal(y, single[:count])
                errors.append(float((y.double() - want[:count]).norm() / want[:count].norm()))
        print(f"{quant_type:7} error {max(errors):.1e} rows independent {same}", flush=True)


def times() -> None:
    for quant_type in ("Q4_K", "Q6_K"):
        for rows, cols in SHAPES:
            packed = random_matrix(quant_type, rows, cols)
            weights = sum(t.nbytes for t in (packed.words, packed.high, packed.scales, packed.shared))
            copies = max(4, 400_000_000 // weights)
            pool = [clone(packed) for _ in range(copies)]
            line = []
            for count, warps in ((1, 1), (1, 2), (4, 1), (8, 1), (8, 2), (8, 4)):
                x, scale = random_rows(count, cols)
                y = torch.empty(count, rows, device=GPU)
                took = timed(lambda i: gemv.multiply(x, scale, pool[i], y, num_warps=warps), copies)  # noqa: B023
                line.append(f"M{count}w{warps} {took:.1f}us {weights / took / 1e6:.2f}")
            print(f"{quant_type} {rows}x{cols} {weights >> 20}MiB | {' | '.join(line)}", flush=True)


def clone(packed: Packed) -> Packed:
    return Packed(
        packed.layout, packed.rows, packed.cols,
        packed.words.clone(), packed.high.clone(), packed.scales.clone(), packed.shared.clone(),
    )  # fmt: skip


if __name__ == "__main__":
    if "check" in sys.argv:
        check()
    if "time" in sys.argv:
        times()
