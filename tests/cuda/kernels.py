"""Every quant type's matrix-vector kernel against float64, and its rate on shapes of an 8B model.

usage: python -m tests.cuda.kernels [check] [time] [TYPE …]
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.kernels import gemv, mma
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
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


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


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
            x = torch.randn(8, cols, device=GPU)
            x8, scale = torch.empty(8, cols, dtype=torch.int8, device=GPU), torch.empty(8, cols // 32, device=GPU)
            write_rows(x8, x, scales=scale)
            want = (x8.view(8, -1, 32).double() * scale[:, :, None]).view(8, cols) @ unpack(packed).double().T
            single = torch.full((8, rows), torch.nan, device=GPU)
            for row in range(8):
                some = single[row : row + 1]
                gemv.multiply(x8.view(torch.int32)[row : row + 1], scale[row : row + 1], packed, some)
            errors.append(error(single, want))
            last = None
            for count in (8, 5, 2):
                write_rows(x8[:count], x[:count], scales=scale, in_fragments=True)
                y = torch.full((count, rows), torch.nan, device=GPU)
                mma.multiply(x8.view(torch.int32)[None], scale[None], packed, y)
                same &= last is None or torch.equal(y, last[:count])
                last = y
                errors.append(error(y, want[:count]))
        print(f"{quant_type:7} error {max(errors):.1e} rows independent {same}", flush=True)


def times() -> None:
    for quant_type in ("Q4_K", "Q6_K", "Q8_0", "IQ4_NL"):
        for rows, cols in SHAPES if quant_type in ("Q4_K", "Q6_K") else SHAPES[2:3]:
            packed = random_matrix(quant_type, rows, cols)
            weights = sum(t.nbytes for t in (packed.words, packed.high, packed.scales, packed.shared))
            copies = max(4, 400_000_000 // weights)
            pool = [clone(packed) for _ in range(copies)]
            line = []
            x, scale = random_rows(8, cols)
            y = torch.empty(8, rows, device=GPU)
            took = timed(lambda i: gemv.multiply(x[:1], scale[:1], pool[i], y[:1]), copies)  # noqa: B023  # called at once
            line.append(f"1 row {took:.1f} us {weights / took / 1e6:.2f} TB/s")
            took = timed(lambda i: mma.multiply(x[None], scale[None], pool[i], y), copies)  # noqa: B023  # called at once
            line.append(f"8 rows {took:.1f} us {weights / took / 1e6:.2f} TB/s")
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
