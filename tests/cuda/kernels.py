# ruff: noqa: B023  # what is timed is called at once
"""Every quant type's matrix-vector kernel against float64, and its rate on shapes of an 8B model.

usage: python -m tests.cuda.kernels [check] [time [shapes]] [TYPE …]
"""

import sys
from collections.abc import Callable

import numpy as np
import torch

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.kernels import gemv, mma
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_rows
from pocketllm.engine.backends.cuda.layouts import LAYOUTS
from pocketllm.engine.backends.cuda.packing import Packed, units_of, unpack
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


def row_values(words: torch.Tensor, marks: torch.Tensor, width: int) -> torch.Tensor:
    """float64 values of rows that `write_rows` wrote as int8: words [rows, units · 8], marks [rows, units · 4]."""
    rows = len(words)
    codes = words.contiguous().view(torch.int8).view(rows, 2, -1, 4, 4, 4)  # half, block, place, unit, byte
    codes = codes.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, 32)
    four, halves = marks.view(rows, -1, 4), codes.view(rows, -1, 2, 16).sum(-1)
    assert torch.equal(four[..., 2:], halves.float())
    assert torch.equal(four[..., 1], halves.sum(-1).float())
    return (codes.double() * four[..., :1].double()).reshape(rows, -1)[:, :width]


def in_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and marks of rows, one after another."""
    units = units_of(x.shape[1])
    words = torch.full((len(x), units * 8), 7, dtype=torch.int32, device=x.device)
    marks = torch.full((len(x), units * 4), torch.nan, device=x.device)
    write_rows(words, x, scales=marks)
    return words, marks


def in_fragments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as the tensor cores read it."""
    units, eights = units_of(x.shape[1]), -(-len(x) // 8)
    words = torch.zeros(eights, units * 64, dtype=torch.int32, device=x.device)
    marks = torch.zeros(eights, units * 32, device=x.device)
    write_rows(words, x, scales=marks, in_fragments=True)
    return words, marks


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
        for rows, cols in ((70, 1280),):
            packed = random_matrix(quant_type, rows, cols)
            words, marks = in_rows(torch.randn(32, cols, device=GPU))
            exact = row_values(words, marks, cols)
            want = exact @ unpack(packed).double().T
            single = torch.full((32, rows), torch.nan, device=GPU)
            for row in range(32):
                gemv.multiply(words[row], marks[row], packed, single[row])
            errors.append(error(single, want))
            x, last = exact.float(), None
            for count in (32, 16, 5):
                traded, traded_marks = in_fragments(x[:count])
                y = torch.full((count, rows), torch.nan, device=GPU)
                mma.multiply(traded, traded_marks, packed, y)
                same &= last is None or torch.equal(y, last[:count])
                last = None if count > 16 else y  # wider products take fewer warps
                errors.append(error(y, want[:count]))
            out = torch.full((rows, cols), torch.nan, device=GPU)
            unpack_rows(packed, out)
            same &= torch.equal(out, unpack(packed))
        print(f"{quant_type:7} error {max(errors):.1e} rows independent, unpacked alike {same}", flush=True)


def times() -> None:
    for quant_type in [name for name in LAYOUTS if name in sys.argv] or ("Q4_K", "Q6_K", "Q8_0", "IQ4_NL"):
        for rows, cols in SHAPES if quant_type in ("Q4_K", "Q6_K") else SHAPES[2:3]:
            packed = random_matrix(quant_type, rows, cols)
            weights = sum(t.nbytes for t in (packed.words, packed.high, packed.scales, packed.shared))
            copies = max(4, 400_000_000 // weights)
            pool = [clone(packed) for _ in range(copies)]
            line = []
            random = torch.randn(32, cols, device=GPU)
            (words, marks), (traded, traded_marks) = in_rows(random), in_fragments(random)
            y = torch.empty(32, rows, device=GPU)
            for shape in (None, (4, 4), (2, 2)) if "shapes" in sys.argv else (None,):
                took = timed(lambda i: gemv.multiply(words[0], marks[0], pool[i], y[0], shape=shape), copies)
                line.append(f"1 row {shape or ''} {took:.1f} us {weights / took / 1e6:.2f} TB/s")
            for count in (8, 32):
                for warps in (4, 8, 16) if "warps" in sys.argv else (None,):
                    took = timed(
                        lambda i: mma.multiply(traded, traded_marks, pool[i], y[:count], num_warps=warps), copies
                    )
                    line.append(f"{count} rows {warps or ''} {took:.1f} us {weights / took / 1e6:.2f} TB/s")
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
