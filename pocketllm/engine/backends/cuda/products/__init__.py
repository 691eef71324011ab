"""Rows times matrices: few rows from weights as they lie, many by the tensor cores, packed ones from unpacked tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cuda.kernels import plain, several, single
from pocketllm.engine.backends.cuda.kernels.fixed import fixed_product, narrow_product
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.several import Several, new_several
from pocketllm.engine.backends.cuda.kernels.single import Halves
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_rows
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS, UNIT
from pocketllm.engine.backends.cuda.matrices import Matrix, Plain, join, may_join
from pocketllm.engine.backends.cuda.packing import Packed, units_of
from pocketllm.engine.backends.cuda.products.many import Multiply, added, finish, library_product, plain_product

FEW_ROWS = several.MAX_ROWS
"""Up to here weights are read in their packed form; beyond, unpacking them once costs less."""
UNPACKED_ELEMENTS = 1 << 26
"""Values unpacked in one go: 128 MiB of float16, in a buffer that all products share."""


@dataclass
class Run:
    """Projections that lie together as one matrix."""

    matrix: Packed | Plain
    widths: list[int]
    bias: Tensor | None


@dataclass(frozen=True)
class Attended:
    """Attention's output, and the same in the form that the next product reads."""

    x: Tensor
    halves: Halves

    def __len__(self) -> int:
        return len(self.x)


class Pair:
    """Two projections of the same rows, computed where they are first read: there it is known whether one gates the
    other."""

    def __init__(self, products: "Products", rows: "Rows", run: Run) -> None:
        self._products = products
        self._rows = rows
        self._run = run
        self._parts: Sequence[Tensor] | None = None

    def part(self, number: int) -> Tensor:
        """One of the two as a tensor."""
        if self._parts is None:
            out = self._products.product(self._rows, self._run, None)
            self._parts = torch.split(out, self._run.widths, 1)
        return self._parts[number]

    def __len__(self) -> int:
        return len(self._rows)

    def gated(self, kind: int, limit: float) -> Halves:
        """The second gated by the first, as the next product reads it."""
        assert isinstance(self._run.matrix, Packed)
        out = new_halves(len(self._rows), self._run.widths[0], self._products.device)
        single.multiply(self._rows.halves(), self._run.matrix, None, self._run.bias, gated=out, gate=kind, limit=limit)
        return out


@dataclass(frozen=True)
class Part:
    """One of a pair."""

    pair: Pair
    number: int

    def __len__(self) -> int:
        return len(self.pair)

    def written(self) -> Tensor:
        """As a tensor."""
        return self.pair.part(self.number)


@dataclass(frozen=True)
class Gated:
    """What a gate lets through of the other, such as silu(gate) · up, computed where it is read."""

    gate: Tensor | Part
    up: Tensor | Part
    kind: int
    """As `kernels.rows.gated_by` has them"""
    limit: float = 0.0
    """Of both, where the kind has one"""

    def __len__(self) -> int:
        return len(self.gate)

    def pair(self) -> Pair | None:
        """The pair of which these are the first and the second, of a single row."""
        gate, up = self.gate, self.up
        if len(self) != 1 or not isinstance(gate, Part) or not isinstance(up, Part):
            return None
        return gate.pair if gate.pair is up.pair and gate.number < up.number else None

    def operands(self) -> tuple[Tensor, Tensor]:
        """Both as tensors."""
        gate, up = (part.written() if isinstance(part, Part) else part for part in (self.gate, self.up))
        return gate, up


class Sum:
    """residual + x · weightᵀ, computed where it is first read: there it is known whether a norm follows."""

    def __init__(self, rows: "Rows", run: Run, residual: Tensor) -> None:
        self._rows = rows
        self._run = run
        self._residual = residual
        self._x: Tensor | None = None

    def __len__(self) -> int:
        return len(self._residual)

    def written(self) -> Tensor:
        """As a tensor."""
        if self._x is None:
            self._compute(None)
        assert self._x is not None
        return self._x

    def normed(self, norm: Norm) -> "Rows | None":
        """The same as a row to multiply, normed but for a factor; None where it was computed without, or has others
        beside it."""
        rows, width = self._residual.shape
        if self._x is not None or rows != 1 or not single.may_hand_on(width):
            return None
        halves = new_halves(rows, width, self._residual.device)
        halves.squares = torch.empty(rows, width // UNIT, dtype=torch.float32, device=self._residual.device)
        halves.eps = norm.eps
        self._compute(single.Next(norm.weight, halves))
        return Rows(self.written(), norm, halves)

    def _compute(self, following: single.Next | None) -> None:
        assert isinstance(self._run.matrix, Packed)
        self._x = torch.empty_like(self._residual)
        matrix, bias = self._run.matrix, self._run.bias
        if len(self) == 1:
            single.multiply(self._rows.halves(), matrix, self._x, bias, self._residual, following)
        else:
            several.multiply(self._rows.several(), matrix, self._x, bias, self._residual)


Operand = Tensor | Gated | Attended | Sum


class Products:
    """Multiplies; keeps which matrices were put together, and the buffer that tiles are unpacked into."""

    def __init__(self, device: torch.device, is_invariant: bool = False) -> None:
        """is_invariant: whether the kind of rows alone picks the form of a product, and never how many there are."""
        self.device = device
        self.is_invariant = is_invariant
        self._multiply: Multiply = fixed_product if is_invariant else library_product
        self._runs: dict[tuple[int, ...], tuple[Sequence[Projection], list[Run]]] = {}
        """By the identities of projections, which are kept with them: no other one may come to have the same."""
        self._unpacked: Tensor | None = None
        self.is_decode = False
        """Whether a step of nothing but single tokens is being run: then products are put off until they are read."""
        self.is_prompt = False
        """Whether rows are multiplied as those of prompts are, however few: in float16 from unpacked weights."""

    def project(
        self, x: Operand, projections: Sequence[Projection], norm: Norm | None, residual: Tensor | None
    ) -> tuple[Tensor | Part, ...]:
        """x · weightᵀ (+ bias) (+ residual) for each; x gated or normed as it is read."""
        runs = self._runs_of(projections)
        # a single row's form comes from the product before it, others are made of rows
        are_handed_on = not self.is_invariant and all(isinstance(run.matrix, Packed) for run in runs)
        rows = rows_of(x, norm, are_handed_on)
        if self.is_decode and len(runs) == 1 and is_pair(runs[0]):
            pair = Pair(self, rows, runs[0])
            return Part(pair, 0), Part(pair, 1)
        results: list[Tensor] = []
        for run in runs:
            results += torch.split(self.product(rows, run, residual), run.widths, 1)
        return tuple(results)

    def product(self, rows: "Rows", run: Run, residual: Tensor | None) -> Tensor:
        """rows · weightᵀ (+ bias) (+ residual) of all that lies together."""
        out = torch.empty(len(rows), sum(run.widths), dtype=torch.float32, device=self.device)
        are_many = self.is_prompt or (len(rows) > FEW_ROWS and not self.is_invariant)
        is_alone = len(rows) == 1 and not self.is_invariant
        if isinstance(run.matrix, Plain) and are_many:
            plain_product(rows, run.matrix.values, out, run.bias, residual, self._multiply)
        elif isinstance(run.matrix, Plain) and (is_alone or run.matrix.values.dtype == torch.float32):
            plain.multiply(rows.floats(), run.matrix.values, out, run.bias, residual)
        elif isinstance(run.matrix, Plain):
            plain_product(rows, run.matrix.values, out, run.bias, residual, narrow_product)
        elif are_many:
            self._large(*rows.scaled(), run.matrix, out, run.bias, residual)
        elif is_alone:
            single.multiply(rows.halves(), run.matrix, out, run.bias, residual)
        else:
            several.multiply(rows.several(), run.matrix, out, run.bias, residual)
        return out

    def logits(self, x: Tensor, router: Projection, norm: Norm | None) -> Tensor:
        """Of many rows, in float32 throughout: another expert is no rounding error."""
        out = self._multiply(rows_of(x, norm, False).floats(), router.weight.held.values)
        added(out, router.bias, None)
        return out

    def sum(self, x: Operand, projection: Projection, residual: Tensor) -> Sum | None:
        """residual + x · weightᵀ, put off; None where there is nothing to gain."""
        [run] = self._runs_of((projection,))
        may_gain = isinstance(run.matrix, Packed) and not self.is_invariant
        return Sum(rows_of(x, None, True), run, residual) if may_gain else None

    def _runs_of(self, projections: Sequence[Projection]) -> list[Run]:
        """Neighbors of one layout put together, once."""
        key = tuple(id(projection) for projection in projections)
        if key not in self._runs:
            self._runs[key] = projections, make_runs(projections)
        return self._runs[key][1]

    def _large(
        self, x: Tensor, scale: Tensor, packed: Packed, out: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> None:
        """Unpack as many rows of the matrix as fit, multiply, go on."""
        if self._unpacked is None:
            self._unpacked = torch.empty(UNPACKED_ELEMENTS, dtype=torch.float16, device=self.device)
        step = max(1, UNPACKED_ELEMENTS // packed.cols // TILE_ROWS) * TILE_ROWS
        for first in range(0, packed.rows, step):
            last = min(first + step, packed.rows)
            tile = self._unpacked[: (last - first) * packed.cols].view(last - first, packed.cols)
            unpack_rows(packed, tile, first)
            finish(self._multiply(x, tile), scale, out, bias, residual, first, last)


class Rows:
    """One operand in the forms that its products need, each made once."""

    def __init__(self, x: Tensor | Gated, norm: Norm | None = None, halves: Halves | None = None) -> None:
        self._x = x
        self._norm = norm
        self._halves = halves
        self._several: Several | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._x)

    def halves(self) -> Halves:
        """Sixteen bits, and a scale for each unit."""
        if self._halves is None:
            pair = self._x.pair() if isinstance(self._x, Gated) else None
            if pair is not None and isinstance(self._x, Gated):
                self._halves = pair.gated(self._x.kind, self._x.limit)
            else:
                x, options = self._source()
                self._halves = new_halves(len(x), x.shape[1], x.device)
                write_rows(self._halves.words, x, scales=self._halves.marks, **options)
        return self._halves

    def several(self) -> Several:
        """float16, and a power of two for each row, as the tensor cores read them."""
        if self._several is None:
            x, options = self._source()
            self._several = new_several(len(x), x.shape[1], x.device)
            write_rows(self._several, x, **options)
        return self._several

    def scaled(self) -> tuple[Tensor, Tensor]:
        """float16, and a power of two for each row."""
        if self._scaled is None:
            x, options = self._source()
            out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
            scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
            write_rows(out, x, scales=scales, **options)
            self._scaled = out, scales
        return self._scaled

    def floats(self) -> Tensor:
        """float32."""
        x, options = self._source()
        if not options:
            return x
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        write_rows(out, x, **options)
        return out

    def _source(self) -> tuple[Tensor, dict[str, Any]]:
        """What `write_rows` is called with."""
        norm = {} if self._norm is None else {"weight": self._norm.weight, "eps": self._norm.eps}
        if isinstance(self._x, Gated):
            gate, up = self._x.operands()
            return gate, {**norm, "up": up, "gate": self._x.kind, "limit": self._x.limit}
        return self._x, norm


def rows_of(x: Operand, norm: Norm | None, are_handed_on: bool) -> Rows:
    """What products read of x; are_handed_on: whether a sum may make a single row's form, as no matrix needs floats."""
    if isinstance(x, Sum):
        return (x.normed(norm) if norm is not None and are_handed_on else None) or Rows(x.written(), norm)
    if isinstance(x, Attended):
        return Rows(x.x, norm, x.halves if norm is None else None)
    return Rows(x, norm)


def new_halves(rows: int, width: int, device: torch.device) -> Halves:
    """Room for a single row in sixteen bits."""
    units = units_of(width)
    words = torch.empty(rows, units * 16, dtype=torch.int32, device=device)
    return Halves(words, torch.empty(rows, units * 4, dtype=torch.float32, device=device))


def is_pair(run: Run) -> bool:
    """Whether the first of two projections can gate the second as they are computed."""
    rows = sum(run.widths)
    return isinstance(run.matrix, Packed) and run.widths == [rows // 2] * 2 and single.may_gate(rows)


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
