"""Rows times matrices: few rows from packed weights, many by the tensor cores on unpacked tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cuda.kernels import gemv, mma
from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_rows
from pocketllm.engine.backends.cuda.layouts import UNIT
from pocketllm.engine.backends.cuda.matrices import Matrix, Plain, join, may_join
from pocketllm.engine.backends.cuda.packing import Packed, units_of

FEW_ROWS = mma.MAX_ROWS
"""Up to here weights are read in their packed form; beyond, unpacking them once costs less."""
UNPACKED_ELEMENTS = 1 << 26
"""Values unpacked in one go: 128 MiB of float16, in a buffer that all products share."""


@dataclass(frozen=True)
class Gated:
    """silu(gate) · up or gelu(gate) · up, computed where it is read."""

    gate: Tensor
    up: Tensor
    kind: int

    def __len__(self) -> int:
        return len(self.gate)


@dataclass(frozen=True)
class Attended:
    """Attention's output, and the same as int8 in words of four, in the form that the product of so many rows reads."""

    x: Tensor
    bytes: Tensor
    marks: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Run:
    """Projections that lie together as one matrix."""

    matrix: Packed | Plain
    widths: list[int]
    bias: Tensor | None


class Sum:
    """residual + x · weightᵀ of one row, computed where it is first read: there it is known whether a norm follows."""

    def __init__(self, rows: "Rows", run: Run, residual: Tensor) -> None:
        self._rows = rows
        self._run = run
        self._residual = residual
        self._x: Tensor | None = None

    def __len__(self) -> int:
        return 1

    def written(self) -> Tensor:
        """As a tensor."""
        if self._x is None:
            self._compute(None)
        assert self._x is not None
        return self._x

    def normed(self, norm: Norm) -> "Rows | None":
        """The same as rows to multiply, normed but for a factor; None where it was computed without."""
        width = self._residual.shape[1]
        if self._x is not None or width % UNIT:
            return None
        device, units = self._residual.device, units_of(width)
        words = torch.empty(1, units * 8, dtype=torch.int32, device=device)
        marks = torch.empty(1, units * 4, dtype=torch.float32, device=device)
        squares = torch.empty(width // UNIT, dtype=torch.float32, device=device)
        self._compute(gemv.Next(norm.weight, words, marks, squares))
        rows = Rows(self.written(), norm)
        rows.take(words, marks, gemv.Factor(squares, norm.eps))
        return rows

    def _compute(self, following: gemv.Next | None) -> None:
        assert isinstance(self._run.matrix, Packed)
        out = torch.empty_like(self._residual)
        words, marks, factor = self._rows.bytes()
        gemv.multiply(
            words[0], marks[0], self._run.matrix, out[0], self._run.bias, self._residual[0], factor, following
        )
        self._x = out


class Products:
    """Multiplies; keeps which matrices were put together, and the buffer that tiles are unpacked into."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: dict[tuple[int, ...], list[Run]] = {}
        self._unpacked: Tensor | None = None
        self.is_prompt = False
        """Whether rows are multiplied as those of prompts are, however few: in float16 from unpacked weights."""

    def reads_fragments(self, rows: int) -> bool:
        """Whether products of so many rows run on the tensor cores from packed weights."""
        return 1 < rows <= FEW_ROWS and not self.is_prompt and not IS_INTERPRETED.value

    def project(
        self,
        x: Tensor | Gated | Attended | Sum,
        projections: Sequence[Projection],
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """x · weightᵀ (+ bias) (+ residual) for each; x gated or normed as it is read."""
        runs = self._runs_of(projections)
        rows = self._rows(x, norm, all(isinstance(run.matrix, Packed) for run in runs))
        results: list[Tensor] = []
        for run in runs:
            out = torch.empty(len(x), sum(run.widths), dtype=torch.float32, device=self._device)
            if isinstance(run.matrix, Plain):
                plain_product(rows.floats(), run.matrix, out, run.bias, residual)
            elif len(x) > FEW_ROWS or self.is_prompt:
                self._large(*rows.halves(), run.matrix, out, run.bias, residual)
            elif self.reads_fragments(len(x)):
                mma.multiply(*rows.fragments(), run.matrix, out, run.bias, residual)
            else:
                each_row(rows, run.matrix, out, run.bias, residual)
            results += torch.split(out, run.widths, 1)
        return tuple(results)

    def sum(self, x: Tensor | Gated | Attended, projection: Projection, residual: Tensor) -> Sum | None:
        """residual + x · weightᵀ of one row, put off; None where there is nothing to gain."""
        [run] = self._runs_of((projection,))
        return Sum(Rows(x, None), run, residual) if isinstance(run.matrix, Packed) else None

    def _rows(self, x: Tensor | Gated | Attended | Sum, norm: Norm | None, are_packed: bool) -> "Rows":
        if isinstance(x, Sum):
            rows = x.normed(norm) if norm is not None and are_packed else None
            return rows or Rows(x.written(), norm)
        return Rows(x, norm)

    def _runs_of(self, projections: Sequence[Projection]) -> list[Run]:
        """Neighbors of one layout put together, once."""
        key = tuple(id(projection) for projection in projections)
        if key not in self._runs:
            self._runs[key] = make_runs(projections)
        return self._runs[key]

    def _large(
        self, x: Tensor, scale: Tensor, packed: Packed, out: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> None:
        """Unpack as many rows of the matrix as fit, multiply, go on."""
        if self._unpacked is None:
            self._unpacked = torch.empty(UNPACKED_ELEMENTS, dtype=torch.float16, device=self._device)
        step = max(1, UNPACKED_ELEMENTS // packed.cols)
        for first in range(0, packed.rows, step):
            last = min(first + step, packed.rows)
            tile = self._unpacked[: (last - first) * packed.cols].view(last - first, packed.cols)
            unpack_rows(packed, tile, first)
            product = half_product(x, tile)
            finish(product, scale, out, bias, residual, first, last)


class Rows:
    """One operand in the forms that its products need, each made once."""

    def __init__(self, x: Tensor | Gated | Attended, norm: Norm | None) -> None:
        given = x if isinstance(x, Attended) and norm is None else None
        x = x.x if isinstance(x, Attended) else x
        self._source = {"x": x.gate, "up": x.up, "gate": x.kind} if isinstance(x, Gated) else {"x": x}
        if norm is not None:
            self._source |= {"weight": norm.weight, "eps": norm.eps}
        self._given = given
        self._bytes: tuple[Tensor, Tensor, gemv.Factor | None] | None = None
        self._fragments: tuple[Tensor, Tensor] | None = None
        self._halves: tuple[Tensor, Tensor] | None = None

    def take(self, words: Tensor, marks: Tensor, factor: gemv.Factor) -> None:
        """Use what a product has handed on."""
        self._bytes = words, marks, factor

    def _shape(self) -> tuple[int, int]:
        x = self._source["x"]
        assert isinstance(x, Tensor)
        return len(x), int(x.shape[1])

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        x = self._source["x"]
        assert isinstance(x, Tensor)
        return torch.empty(shape, dtype=dtype, device=x.device)

    def bytes(self) -> tuple[Tensor, Tensor, gemv.Factor | None]:
        """int8 in words of four, [rows, units · 8], and marks of units, [rows, units · 4]."""
        if self._bytes is None:
            rows, width = self._shape()
            units = units_of(width)
            if self._given is not None:
                words, marks = self._given.bytes.view(-1, units * 8), self._given.marks.view(-1, units * 4)
            else:
                words, marks = self._empty(rows, units * 8), self._empty(rows, units * 4, dtype=torch.float32)
                write_rows(words, scales=marks, **self._source)
            self._bytes = words, marks, None
        return self._bytes

    def fragments(self) -> tuple[Tensor, Tensor]:
        """The same in the order that the tensor cores' threads read it, eight rows together."""
        if self._given is not None:
            return self._given.bytes, self._given.marks
        if self._fragments is None:
            rows, width = self._shape()
            eights, units = -(-rows // mma.AT_ONCE), units_of(width)
            words, marks = self._empty(eights, units * 64), self._empty(eights, units * 32, dtype=torch.float32)
            write_rows(words, scales=marks, in_fragments=True, **self._source)
            self._fragments = words, marks
        return self._fragments

    def halves(self) -> tuple[Tensor, Tensor]:
        """float16, and a power of two for each row."""
        if self._halves is None:
            shape = self._shape()
            out, scales = self._empty(*shape, dtype=torch.float16), self._empty(shape[0], dtype=torch.float32)
            write_rows(out, scales=scales, **self._source)
            self._halves = out, scales
        return self._halves

    def floats(self) -> Tensor:
        """float32."""
        if self._source.keys() == {"x"}:
            x = self._source["x"]
            assert isinstance(x, Tensor)
            return x
        out = self._empty(*self._shape(), dtype=torch.float32)
        write_rows(out, **self._source)
        return out


def make_runs(projections: Sequence[Projection]) -> list[Run]:
    """Put neighbors of one layout together."""
    groups: list[list[Projection]] = []
    for projection in projections:
        if groups and may_join([p.weight for p in (*groups[-1], projection)]):
            groups[-1].append(projection)
        else:
            groups.append([projection])
    runs = []
    for group in groups:
        matrices: list[Matrix] = [projection.weight for projection in group]
        held = matrices[0].held if len(group) == 1 else join(matrices)
        runs.append(Run(held, [matrix.rows for matrix in matrices], joined_bias(group)))
    return runs


def joined_bias(group: Sequence[Projection]) -> Tensor | None:
    """One bias after another, zeros where there is none; None where none has one."""
    given = [projection.bias for projection in group if projection.bias is not None]
    if not given:
        return None
    zeros = [given[0].new_zeros(projection.weight.rows) for projection in group]
    return torch.cat([zero if p.bias is None else p.bias for p, zero in zip(group, zeros, strict=True)])


def each_row(rows: Rows, packed: Packed, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """One row after another; more than one only where Triton's interpreter runs the kernels."""
    words, marks, factor = rows.bytes()
    for row in range(len(out)):
        added = None if residual is None else residual[row]
        gemv.multiply(words[row], marks[row], packed, out[row], bias, added, factor)


def plain_product(x: Tensor, plain: Plain, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """float32 throughout; eight rows at least, so that a row's sums do not depend on how few there are."""
    padded = x if len(x) >= 8 else torch.nn.functional.pad(x, (0, 0, 0, 8 - len(x)))
    product = (padded @ plain.values.float().T)[: len(x)]
    if bias is not None:
        product = product + bias
    out.copy_(product if residual is None else product + residual)


def half_product(x: Tensor, tile: Tensor) -> Tensor:
    """x · tileᵀ of float16, summed and given in float32."""
    if x.device.type == "cpu":
        return x.float() @ tile.float().T
    return torch.mm(x, tile.T, out_dtype=torch.float32)


def finish(
    product: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, first: int, last: int
) -> None:
    """out[:, first:last] = scale · product (+ bias) (+ residual)."""
    target = out[:, first:last]
    if residual is None:
        torch.mul(product, scale[:, None], out=target)
    else:
        torch.addcmul(residual[:, first:last], product, scale[:, None], out=target)
    if bias is not None:
        target += bias[first:last]
