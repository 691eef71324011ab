"""Rows times matrices: few rows by the matrix-vector kernel, many by the tensor cores on unpacked tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cuda.kernels import gemv, mma
from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_rows
from pocketllm.engine.backends.cuda.matrices import Matrix, Plain, join, may_join
from pocketllm.engine.backends.cuda.packing import Packed

FEW_ROWS = 16
"""Up to here each weight is read in its packed form, eight rows at a time; beyond, unpacking once costs less."""
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
    scales: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Run:
    """Projections that lie together as one matrix."""

    matrix: Packed | Plain
    widths: list[int]
    bias: Tensor | None


def reads_fragments(rows: int) -> bool:
    """Whether products of so many rows run on the tensor cores from packed weights."""
    return 1 < rows <= FEW_ROWS and not IS_INTERPRETED.value


class Products:
    """Multiplies; keeps which matrices were put together, and the buffer that tiles are unpacked into."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: dict[tuple[int, ...], list[Run]] = {}
        self._unpacked: Tensor | None = None

    def project(
        self,
        x: Tensor | Gated | Attended,
        projections: Sequence[Projection],
        norm: Norm | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """x · weightᵀ (+ bias) (+ residual) for each; x gated or normed as it is read."""
        runs = self._runs_of(projections)
        rows = Rows(x, norm)
        results: list[Tensor] = []
        for run in runs:
            out = torch.empty(len(x), sum(run.widths), dtype=torch.float32, device=self._device)
            if isinstance(run.matrix, Plain):
                plain_product(rows.floats(), run.matrix, out, run.bias, residual)
            elif len(x) > FEW_ROWS:
                self._large(*rows.halves(), run.matrix, out, run.bias, residual)
            elif reads_fragments(len(x)):
                mma.multiply(*rows.fragments(), run.matrix, out, run.bias, residual)
            else:
                gemv.multiply(*rows.bytes(), run.matrix, out, run.bias, residual)
            results += torch.split(out, run.widths, 1)
        return tuple(results)

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
        self._bytes: tuple[Tensor, Tensor] | None = None
        self._fragments: tuple[Tensor, Tensor] | None = None
        if given is not None and reads_fragments(len(given)):
            blocks = -(-len(given) // mma.MAX_ROWS)
            self._fragments = given.bytes.view(blocks, -1), given.scales.view(blocks, -1)
        elif given is not None:
            self._bytes = given.bytes.view(-1, given.x.shape[1] // 4)[: len(given)], given.scales
        self._halves: tuple[Tensor, Tensor] | None = None

    def _write(self, dtype: torch.dtype, *scales: int) -> tuple[Tensor, Tensor]:
        x = self._source["x"]
        assert isinstance(x, Tensor)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        kept = torch.empty(scales, dtype=torch.float32, device=x.device)
        write_rows(out, scales=kept if scales else None, **self._source)
        return out, kept

    def _shape(self) -> tuple[int, int]:
        x = self._source["x"]
        assert isinstance(x, Tensor)
        return len(x), int(x.shape[1])

    def bytes(self) -> tuple[Tensor, Tensor]:
        """int8 in words of four, and a scale for each 32 values."""
        if self._bytes is None:
            rows, width = self._shape()
            out, scales = self._write(torch.int8, rows, width // gemv.X_GROUP)
            self._bytes = out.view(torch.int32), scales
        return self._bytes

    def fragments(self) -> tuple[Tensor, Tensor]:
        """The same in the order that the tensor cores' threads read it, eight rows together."""
        if self._fragments is None:
            rows, width = self._shape()
            blocks = -(-rows // mma.MAX_ROWS)
            x = self._source["x"]
            assert isinstance(x, Tensor)
            out = torch.empty(blocks, mma.MAX_ROWS * width, dtype=torch.int8, device=x.device)
            scales = torch.empty(blocks, mma.MAX_ROWS * width // gemv.X_GROUP, dtype=torch.float32, device=x.device)
            write_rows(out, scales=scales, in_fragments=True, **self._source)
            self._fragments = out.view(torch.int32), scales
        return self._fragments

    def halves(self) -> tuple[Tensor, Tensor]:
        """float16, and a power of two for each row."""
        if self._halves is None:
            self._halves = self._write(torch.float16, self._shape()[0])
        return self._halves

    def floats(self) -> Tensor:
        """float32."""
        if self._source.keys() == {"x"}:
            x = self._source["x"]
            assert isinstance(x, Tensor)
            return x
        return self._write(torch.float32)[0]


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
