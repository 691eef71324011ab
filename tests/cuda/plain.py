"""Products with matrices of plain floats against float64, in Triton's interpreter or on a GPU.

usage: python -m tests.cuda.plain [few] [alone] [many] [operations] [large] [time] [shapes] [tiles] [F16] [BF16] [F32]
           (TRITON_INTERPRET=1 without a GPU; large and what follows: of real sizes, on a GPU alone, of these types)
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cuda.kernels.fixed import NARROW, fixed_product, narrow_product
from pocketllm.engine.backends.cuda.kernels.plain import multiply
from pocketllm.engine.backends.cuda.matrices import PLAIN, Matrix, Plain
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.backends.cuda.products import Products, Rows
from pocketllm.engine.backends.cuda.products.many import library_product, plain_product
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.cuda.kernels import error, timed
from tests.cuda.mixtures import DEVICE
from tests.cuda.words import asked

COUNTS = {(1, 1): (1, 2, 33), (5, 33): (1, 2, 3, 8, 9, 32), (48, 80): (9,)}
"""Rows of x, by rows and width of a matrix: one value; what fills nothing; several programs."""
REAL = ((4096, 4096), (4096, 14336), (14336, 4096), (1024, 4096), (576, 576), (128256, 4096))
BOUNDS = {"F16": 2**-11, "BF16": 2**-17, "F32": 1e-6}
"""Of a prompt's products, as shares of the sum of their sizes: x in eleven bits, in sixteen, and as it is."""
SUMMED = 1e-6
"""Of sums in float32 of products that are exact."""


def matrix(kind: str, rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device=DEVICE).to(PLAIN[kind])


def poisoned(count: int, rows: int) -> torch.Tensor:
    return torch.full((count, rows), torch.nan, device=DEVICE)


def few() -> None:
    """The kernel for a few rows, with what is added to sums and without, over outputs that were poisoned."""
    for kind, ((rows, width), counts) in product(PLAIN, COUNTS.items()):
        weight, bias = matrix(kind, rows, width), torch.randn(rows, device=DEVICE)
        for count in counts:
            x, residual = torch.randn(count, width, device=DEVICE), torch.randn(count, rows, device=DEVICE)
            want, y = x.double() @ weight.double().T, poisoned(count, rows)
            if count % 2:
                multiply(x, weight, y, bias, residual)
                want += bias + residual
            else:
                multiply(x, weight, y)
            assert error(y, want) < SUMMED, (kind, rows, width, count)


def alone() -> None:
    """A row has the same bits beside any others, where warps share rows of the matrix and take several steps too; what
    a matrix and x have behind their ends is not read."""
    for kind, width in (("F16", 1280), ("BF16", 520), ("F32", 1028)):
        weight, x = matrix(kind, 7, width), torch.randn(11, width, device=DEVICE)
        whole = poisoned(11, 7)
        multiply(x, weight, whole)
        assert error(whole, x.double() @ weight.double().T) < SUMMED, kind
        for first, last in ((5, 6), (8, 10), (4, 8), (3, 10)):
            y = poisoned(last - first, 7)
            multiply(x[first:last], weight, y)
            assert torch.equal(y, whole[first:last]), (kind, first, last)
        wider, other = poisoned(2, width + 20), poisoned(8, width)
        wider[:, :width], other[:7] = x[:2], weight
        y = poisoned(2, 7)
        multiply(wider[:, :width], other[:7].to(PLAIN[kind]), y)
        assert torch.equal(y, whole[:2]), (kind, "rows of something wider")


def many() -> None:
    """Prompts' products, by the library and in tiles of one size, of rows of very different sizes."""
    for kind, (rows, width), form in product(PLAIN, COUNTS, (library_product, fixed_product, narrow_product)):
        weight, bias = matrix(kind, rows, width), torch.randn(rows, device=DEVICE)
        for count in (1, 33):
            sizes = 10 ** torch.linspace(-6, 6, count, device=DEVICE)[:, None]
            x, residual = torch.randn(count, width, device=DEVICE) * sizes, torch.randn(count, rows, device=DEVICE)
            want, y = x.double() @ weight.double().T, poisoned(count, rows)
            plain_product(Rows(x), weight, y, None, None, form)
            far = (y - want).abs() / (x.double().abs() @ weight.double().abs().T)
            assert far.max() < BOUNDS[kind], (kind, rows, width, count, form.__name__, float(far.max()))
            plain_product(Rows(x), weight, y, bias, residual, form)
            assert error(y, want + bias + residual) < BOUNDS[kind], (kind, rows, width, count, form.__name__, "added")
    for kind, is_invariant in product(PLAIN, (False, True)):  # experts are told apart by all that float32 has
        weight, bias, x = matrix(kind, 5, 33), torch.randn(5, device=DEVICE), torch.randn(33, 33, device=DEVICE)
        products = Products(torch.device(DEVICE), is_invariant)
        y = products.logits(x, Projection(Matrix(Plain(weight)), bias), None)
        assert error(y, x.double() @ weight.double().T + bias) < SUMMED, (kind, is_invariant)


def operations() -> None:
    """Few and many rows through `project` as the reference has them, normed and with what is added."""
    ops, reference = CudaOps("float32", DEVICE), ReferenceOps()
    norm = np.random.default_rng(0).standard_normal(72).astype(np.float32)
    for kind, bound in BOUNDS.items():
        values = matrix(kind, 20, 72).view(torch.uint8).cpu().numpy().reshape(-1)
        for count in (1, 2, 33):
            x, results = torch.randn(count, 72), []
            for own in (ops, reference):
                weight = Projection(own.load_matrix(values, kind, (20, 72)), own.load_vector(norm[:20]))
                rows = own.load_vector(x.numpy().reshape(-1)).reshape(count, 72)
                [y] = own.project(rows, weight, norm=Norm(own.load_vector(norm), 1e-5))
                results.append(torch.from_numpy(own.to_numpy(own.project_add(rows, weight, y))))
            assert error(*results) < bound, (kind, count)


def large() -> None:
    """The largest errors at real sizes; a row's bits beside any others."""
    amiss = []
    for kind, (rows, width) in product(kinds(), REAL):
        weight = matrix(kind, rows, width)
        x, line = torch.randn(512, width, device=DEVICE), []
        want = torch.cat([x.double() @ part.double().T for part in weight.split(8192)], 1)
        whole = poisoned(32, rows)
        multiply(x[:32], weight, whole)
        for count in (1, 2, 3, 8, 9, 32):
            y = poisoned(count, rows)
            multiply(x[:count], weight, y)
            far, is_same = error(y, want[:count]), torch.equal(y, whole[:count])
            line.append(f"×{count} {far:.1e}{' OTHER BITS' * (not is_same)}")
            amiss += [line[-1]] * (not is_same or not far < SUMMED)
        beside = narrow_product(x[:32].to(weight.dtype), weight)
        for count in (1, 3, 8):
            is_same = torch.equal(narrow_product(x[:count].to(weight.dtype), weight), beside[:count])
            amiss += [f"{kind} {width}→{rows} narrow ×{count}"] * (not is_same)
        for form in (library_product, fixed_product, narrow_product):
            y = poisoned(512, rows)
            plain_product(Rows(x), weight, y, None, None, form)
            line.append(f"×512 {form.__name__} {error(y, want):.1e}")
            # tensor cores round sums downwards, once for 16 values
            amiss += [line[-1]] * (not error(y, want) < BOUNDS[kind] + 1e-8 * width)
        print(f"{kind} {width}→{rows}: {' · '.join(line)}", flush=True)
    assert not amiss, amiss


def time() -> None:
    """Products by rows."""
    for count in (1, 8, 32):
        swept(REAL, count, [None])


def shapes() -> None:
    """The same by shape: rows of x and of the matrix at once, and steps under way."""
    swept(REAL[:3], 1, [*product((1,), (2, 4, 8), (2, 4))])
    swept(REAL[:3], 8, [*product((8,), (2, 4), (1, 2, 4)), (8, 8, 1), (4, 4, 2)])
    swept(REAL[:3], 32, [(4, 4, 2), (8, 4, 1), (8, 4, 2), (8, 8, 1), (16, 2, 2), (16, 4, 1)])


def swept(sizes: Sequence[tuple[int, int]], count: int, tried: Sequence[tuple[int, int, int] | None]) -> None:
    for kind, (rows, width) in product(kinds(), sizes):
        first = matrix(kind, rows, width)
        pool = [first.clone() for _ in range(max(4, 400_000_000 // first.nbytes))]
        x, y, line = torch.randn(count, width, device=DEVICE), poisoned(count, rows), []
        for shape in tried:
            run = partial(multiply, x, y=y, shape=shape)
            took = timed_over(pool, run)
            line.append(f"{shape or ''} {took:.1f} µs {first.nbytes / took / 1e6:.2f} TB/s")
        print(f"{kind} {width}→{rows} {first.nbytes >> 20} MiB ×{count} | {' | '.join(line)}", flush=True)


def tiles() -> None:
    """Products of 8 and 32 rows on the tensor cores, x given in float16, by tile; beside a library's."""
    for rows, width in REAL[:4]:
        first = matrix("F16", rows, width)
        pool = [first.clone() for _ in range(max(4, 400_000_000 // first.nbytes))]
        for count in (8, 32):
            x, line = torch.randn(count, width, device=DEVICE).half(), []
            for cols, depth, stages in product((16, 32, 64), (64, 128), (4, 6)):
                run = partial(fixed_product, x, tile={**NARROW, "COLS": cols, "DEPTH": depth, "num_stages": stages})
                line.append(f"{cols},{depth},{stages} {timed_over(pool, run):.1f}")
            library = timed_over(pool, partial(library_product, x))
            print(f"{width}→{rows} ×{count}: library {library:.1f} µs · {' · '.join(line)}", flush=True)


def timed_over(pool: Sequence[torch.Tensor], run: Callable[[torch.Tensor], object]) -> float:
    """Microseconds of one call, over matrices in turn, so that none is in a cache."""

    def call(number: int) -> None:
        run(pool[number])

    return timed(call, len(pool))


def kinds() -> list[str]:
    """Those on the command line, or all."""
    return [kind for kind in PLAIN if kind in sys.argv] or list(PLAIN)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (few, alone, many, operations, large, time, shapes, tiles)
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in asked(__doc__, [*PARTS, *PLAIN]):
        if name in PARTS:
            PARTS[name]()
            print(f"{name}: done, and nothing amiss", flush=True)
