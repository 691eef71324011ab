# ruff: noqa: B023  # what is timed is called at once
"""Every quant type's products against float64, and its rate on shapes of an 8B model.

usage: python -m tests.cuda.kernels [check] [time [compile] [shapes] [rows=1,8,32] [matrices=0,1,2,3]] [TYPE …]
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.kernels import several, single
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.several import Several, new_several
from pocketllm.engine.backends.cuda.kernels.single import Halves
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_rows
from pocketllm.engine.backends.cuda.layouts import LAYOUTS, UNIT
from pocketllm.engine.backends.cuda.packing import Packed, unpack
from pocketllm.engine.backends.cuda.products import new_halves
from pocketllm.engine.weights.quant_types import BY_NAME
from tests.cuda.synthetic import HALVES
from tests.cuda.words import asked

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SWEPT = ((1, 2), (1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (8, 1))
GPU = torch.device("cuda")


def random_matrix(quant_type: str, rows: int, cols: int, seed: int = 0) -> Packed:
    kind = BY_NAME[quant_type]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, cols // kind.block_elements, kind.block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant_type, ()):
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if quant_type == "MXFP4":
        data[..., 0] = random.integers(118, 126, data.shape[:2])
    if quant_type == "IQ1_M":  # its scale lies in the upper halves of four bytes
        for at, part in zip((49, 51, 53, 55), (0xF, 0x1, 0x1, 0x2), strict=True):
            data[..., at] = data[..., at] & 15 | part << 4
    held = matrices.load(data, quant_type, (rows, cols), GPU).held
    assert isinstance(held, Packed)
    return held


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def values_of(x: Halves | Several, width: int) -> torch.Tensor:
    """float64 values of rows in the form that products read, [rows, width]; the sums beside them are checked."""
    if isinstance(x, Halves):
        return values_of_one(x, width)
    rows, units = len(x), x.words.shape[1] * 4
    codes = x.words.double().transpose(1, 2).reshape(-1, units, 2, 2, 4, 2)[:rows]  # row, unit, half, pair, place
    codes = codes.permute(0, 1, 2, 4, 5, 3).reshape(rows, units, 2, 16)
    codes = codes * torch.tensor([1.0, 16.0], dtype=torch.float64, device=codes.device)[:, None]
    sums = x.sums.double().transpose(1, 2).reshape(-1, units // 4, 2, 4, 2)[:rows].sum(-1)  # row, block, half, unit
    sums = sums.transpose(2, 3).reshape(rows, units, 2)
    assert torch.allclose(sums, codes.sum(-1), rtol=1e-6, atol=1e-3)
    return (codes.flatten(1) * x.scales[:, None].double())[:, :width]


def values_of_one(x: Halves, width: int) -> torch.Tensor:
    """The same of a single row, which has another form."""
    units = x.words.shape[1] // 16
    codes = x.words[0].view(torch.int8).view(-1, 4, 2, 2, 4, 4).double()  # block, place, half, level, unit
    codes = codes[:, :, :, 0] * 256 + codes[:, :, :, 1]
    codes = codes.permute(0, 3, 2, 1, 4).reshape(units, 2, 16)
    marks = x.marks[0].view(units, 4).double()
    assert torch.equal(marks[:, 2:], codes.sum(-1))
    assert torch.equal(marks[:, 1], codes.sum((-2, -1)))
    return (codes.flatten(1) * marks[:, :1]).reshape(1, -1)[:, :width]


def rows_in(x: torch.Tensor) -> Halves | Several:
    """Rows as products read them; what is not written is poisoned."""
    if len(x) > 1:
        rows = new_several(len(x), x.shape[1], x.device)
        for part in (rows.words, rows.sums, rows.scales):
            part.fill_(torch.nan)
        rows.arrivals.fill_(7)
        write_rows(rows, x)
        return rows
    halves = new_halves(1, x.shape[1], x.device)
    halves.words.fill_(0x7E007E00)
    halves.marks.fill_(torch.nan)
    write_rows(halves.words, x, scales=halves.marks)
    return halves


def multiply(x: Halves | Several, packed: Packed, y: torch.Tensor, *added: torch.Tensor, shape: Any = None) -> None:
    """A product by the kernel that takes so many rows."""
    if isinstance(x, Halves):
        single.multiply(x, packed, y, *added, shape=shape)
    else:
        several.multiply(x, packed, y, *added)


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
        for rows, cols in ((70, 1280), (256, 768)):
            packed = random_matrix(quant_type, rows, cols)
            x = torch.randn(32, cols, device=GPU) * 10 ** torch.linspace(-6, 6, 32, device=GPU)[:, None]
            exact = values_of(rows_in(x), cols)
            assert error(exact[-1], x[-1].double()) < 4e-4
            want, last = exact @ unpack(packed).double().T, None
            for count in (32, 24, 16, 5):
                y = torch.full((count, rows), torch.nan, device=GPU)
                multiply(rows_in(x[:count]), packed, y)
                same &= last is None or torch.equal(y, last[:count])
                last = y
                errors.append(max(error(y[row], want[row]) for row in range(count)))
            for row in (0, 17, 31):
                y, one = torch.full((1, rows), torch.nan, device=GPU), rows_in(x[row : row + 1])
                multiply(one, packed, y)
                errors.append(error(y, values_of(one, cols) @ unpack(packed).double().T))
            out = torch.full((rows, cols), torch.nan, device=GPU)
            unpack_rows(packed, out)
            same &= torch.equal(out, unpack(packed))
            if rows == 256:
                errors += [check_added(packed, x[8:24]), check_ends(packed, x[15:16])]
        print(f"{quant_type:7} error {max(errors):.1e} rows independent, unpacked alike {same}", flush=True)


def check_added(packed: Packed, x: torch.Tensor) -> float:
    """The error of several rows with a bias and a residual."""
    rows, own = packed.rows, rows_in(x)
    bias, residual = torch.randn(rows, device=GPU), torch.randn(len(x), rows, device=GPU)
    y = torch.full((len(x), rows), torch.nan, device=GPU)
    multiply(own, packed, y, bias, residual)
    return error(y, values_of(own, packed.cols) @ unpack(packed).double().T + bias.double() + residual.double())


def check_ends(packed: Packed, x: torch.Tensor) -> float:
    """The largest error of what a product of one row hands on, gated or to be normed, and of a factor that it takes."""
    rows, halves = packed.rows, rows_in(x)
    assert isinstance(halves, Halves)
    want = values_of(halves, packed.cols) @ unpack(packed).double().T
    halves.squares, halves.eps = torch.rand(1, packed.cols // UNIT, device=GPU) + 0.5, 1e-5
    want = want * torch.rsqrt(halves.squares.double().sum(1, keepdim=True) / packed.cols + 1e-5)
    bias, residual = torch.randn(rows, device=GPU), torch.randn(1, rows, device=GPU)
    gated = new_halves(1, rows // 2, GPU)
    single.multiply(halves, packed, None, bias, gated=gated, gate=1)
    gate, up = (want + bias.double()).split(rows // 2, 1)
    errors = [error(values_of(gated, rows // 2), torch.nn.functional.silu(gate) * up)]
    weight, y = torch.randn(rows, device=GPU), torch.full((1, rows), torch.nan, device=GPU)
    handed = new_halves(1, rows, GPU)
    handed.squares = torch.full((1, rows // UNIT), torch.nan, device=GPU)
    single.multiply(halves, packed, y, bias, residual, single.Next(weight, handed))
    want = want + bias.double() + residual.double()
    errors += [error(y, want), error(values_of(handed, rows), want * weight.double())]
    errors.append(error(handed.squares.sum(1), (want * want).sum(1)))
    return max(errors)


def option(name: str, otherwise: str) -> str:
    """What the command line says after `name=`."""
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(f"{name}=")), otherwise)


def times() -> None:
    """Times of products; `compile`: compile them only."""
    is_timed, counts = "compile" not in sys.argv, [int(count) for count in option("rows", "1,8,32").split(",")]
    matrices_of = [SHAPES[int(number)] for number in option("matrices", "0,1,2,3").split(",")]
    for quant_type in [name for name in LAYOUTS if name in sys.argv] or ("Q4_K", "Q6_K", "Q8_0", "IQ4_NL"):
        for rows, cols in matrices_of:
            packed = random_matrix(quant_type, rows, cols)
            weights = sum(t.nbytes for t in (packed.words, packed.high, packed.scales, packed.shared))
            copies = max(4, 400_000_000 // weights) if is_timed else 1
            pool = [clone(packed) for _ in range(copies)]
            y = torch.empty(32, rows, device=GPU)
            for count in counts:
                x, line = rows_in(torch.randn(count, cols, device=GPU)), []
                for shape in SWEPT if "shapes" in sys.argv and count == 1 else (None,):
                    run = partial(multiply, x, y=y[:count], shape=shape)
                    if not is_timed:
                        run(packed=packed)
                        continue
                    took = timed(lambda i: run(packed=pool[i]), copies)
                    line.append(f"{shape or ''} {took:.1f} us {weights / took / 1e6:.2f} TB/s")
                print(f"{quant_type} {rows}x{cols} {weights >> 20}MiB {count} rows | {' | '.join(line)}", flush=True)


def clone(packed: Packed) -> Packed:
    return Packed(
        packed.layout, packed.rows, packed.cols,
        packed.words.clone(), packed.high.clone(), packed.scales.clone(), packed.shared.clone(),
    )  # fmt: skip


if __name__ == "__main__":
    asked(__doc__, ["check", "time", "compile", "shapes", "rows", "matrices", *LAYOUTS])
    if "check" in sys.argv:
        check()
    if "time" in sys.argv:
        times()
