"""Mixtures of experts: routed, grouped and multiplied on the device, at sizes that shapes alone fix.

A row by itself is three launches: its router; gates and what they let through, of all its experts, each program routing
the row again; then all its experts' second products, weighed and summed. Several rows are grouped by expert first, in
items of as many rows as one instruction takes or a few times that, and each pair of a row and an expert is written once
and summed in the order of ranks. A row's result is the same whatever rows are beside it, from two rows on.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.mixture import Experts
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS
from pocketllm.engine.backends.cuda.kernels.several import WARPS, Several, steps_of
from pocketllm.engine.backends.cuda.kernels.single import Halves, Next
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS, UNIT
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Plain
from pocketllm.engine.backends.cuda.mixtures.groups import (
    Ends,
    Groups,
    Many,
    Normed,
    Source,
    floats_of,
    gathered,
    grouped,
    is_plain,
    let_through,
    route,
    route_options,
    source_of,
)
from pocketllm.engine.backends.cuda.mixtures.kernels import products, routes
from pocketllm.engine.backends.cuda.packing import Packed, units_of
from pocketllm.engine.backends.cuda.products import FEW_ROWS, Products, Sum

PER_PROGRAM = 32
"""Rows of a matrix: two tiles."""
AHEAD = 2
"""Blocks of weights that a warp has under way of a single row's gates, and of what they let through."""
MANY_AT_ONCE = 64
"""The same where rows are many."""
LINES = 32
"""Units of a row that one program sums."""


class Mixed:
    """What experts make of rows, computed where it is read: there it is known what it is added to."""

    def __init__(self, rows: int, close: Callable[[Tensor | None, Next | None], Tensor]) -> None:
        """close: with what is added and what follows."""
        self._rows = rows
        self._close = close
        self._x: Tensor | None = None

    def __len__(self) -> int:
        return self._rows

    def written(self) -> Tensor:
        """As a tensor."""
        if self._x is None:
            self._x = self._close(None, None)
        return self._x

    def added_to(self, residual: Tensor, following: Next | None) -> Tensor:
        """residual and this, and more of it where a norm follows."""
        return self._close(residual, following)


class MixedSum(Sum):
    """residual + what experts make of rows."""

    def __init__(self, mixed: Mixed, residual: Tensor) -> None:
        self._mixed = mixed
        self._residual = residual
        self._x = None

    def _compute(self, following: Next | None) -> None:
        self._x = self._mixed.added_to(self._residual, following)


class Mixtures:
    """Launches the kernels; keeps nothing."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def mixture(
        self,
        x: Tensor | Normed,
        experts: Experts,
        ends: Ends,
        routed_by: Tensor | Normed | None = None,
        named: Tensor | None = None,
    ) -> Mixed:
        """Σ weight · expert(x); routed_by: rows that the router reads, where they are others; named: as for `route`."""
        is_alone = len(x) == 1 and not self._products.is_prompt and not self._products.is_invariant
        is_one = is_alone and is_fused(experts)
        source = source_of(x, is_one)
        logits = self._logits(source if routed_by is None else source_of(routed_by, False), experts)
        if is_one:
            return self._of_one(source, logits, experts, ends, named)
        return self._of_several(source, logits, experts, ends, named)

    def _logits(self, source: Source, experts: Experts) -> Tensor:
        """float32 throughout, [rows, experts]."""
        rows, router = len(source.x), experts.router
        if self._products.is_prompt or rows > FEW_ROWS:
            return self._products.logits(source.x, router, source.norm).contiguous()
        weight, eps, has_norm = source.norm_options()
        values, count = router.weight.held.values, router.weight.rows
        line = triton.next_power_of_2(source.x.shape[1])
        each = 4 if (rows > 1 or self._products.is_invariant) and line <= 4096 else 1
        logits = torch.empty(rows, count, dtype=torch.float32, device=source.x.device)
        routes.router_kernel[(-(-count // each), rows)](
            source.x, weight, values, logits if router.bias is None else router.bias, logits, source.x.stride(0),
            source.x.shape[1], count, eps,
            LINE=line, EACH=each, HAS_NORM=has_norm, HAS_BIAS=router.bias is not None, num_warps=4, **OPTIONS,
        )  # fmt: skip
        return logits

    def _of_one(self, source: Source, logits: Tensor, experts: Experts, ends: Ends, named: Tensor | None) -> Mixed:
        """A row by itself."""
        gate, up, used = experts.gate, experts.up, experts.routing.num_used
        assert source.rows is not None
        x, device, out_units = source.rows.halves(), logits.device, units_of(gate.rows)
        chosen = torch.empty(used, dtype=torch.int32, device=device)
        weights = torch.empty(used, dtype=torch.float32, device=device)
        gated = torch.empty(used, out_units * 16, dtype=torch.int32, device=device)
        marks = torch.empty(used, out_units * 4, dtype=torch.float32, device=device)
        is_routed = named is not None or not is_plain(experts.routing)
        if is_routed:
            route(logits, experts.routing, ends, chosen, weights, named)
        choice, scale, numbers, constants = route_options(experts.routing, ends, logits)
        shares = opening_shares(units_of(gate.cols))
        products.opening_one_kernel[(out_units, used)](
            x.words, x.marks, x.marks if x.squares is None else x.squares, logits, choice, scale,
            *parts(gate.packed), *parts(up.packed), *biases(ends, logits), chosen, weights, gated, marks,
            *numbers, gate.cols, x.eps, ends.slope, ends.limit, *gate.packed.layout.packed_table,
            units=units_of(gate.cols), inner=gate.rows, out_units=out_units,
            SQUARES=1 if x.squares is None else triton.next_power_of_2(gate.cols // UNIT), SHARES=shares, AHEAD=AHEAD,
            HAS_FACTOR=x.squares is not None, GATE=ends.gate, HAS_BIAS=ends.gate_bias is not None,
            IS_ROUTED=is_routed, **constants, **form(gate.packed),
            num_warps=2 * shares, enable_fp_fusion=False, **OPTIONS,
        )  # fmt: skip

        def close(residual: Tensor | None, following: Next | None) -> Tensor:
            return close_one(Halves(gated, marks), chosen, weights, experts, ends, residual, following)

        return Mixed(1, close)

    def _of_several(self, source: Source, logits: Tensor, experts: Experts, ends: Ends, named: Tensor | None) -> Mixed:
        """Rows by expert."""
        are_many = self._products.is_prompt or len(logits) > FEW_ROWS
        groups = grouped(logits, experts.routing, ends, are_many, named, self._products.is_invariant)
        opened = open_several(source, experts, groups, ends)
        y = product(opened, experts.down, groups, 1, ends.down_bias)

        def close(residual: Tensor | None, following: Next | None) -> Tensor:
            return summed(y, groups.weights, residual, following)

        return Mixed(len(source.x), close)


Operand = Several | Many | Tensor
"""Rows in slots, for few or many rows of packed matrices; or floats, for plain ones."""


def is_fused(experts: Experts) -> bool:
    """Whether gates and what they let through lie in one layout, so that one kernel reads both."""
    gate, up, down = (matrix.held for matrix in (experts.gate, experts.up, experts.down))
    if not (isinstance(gate, Packed) and isinstance(up, Packed) and isinstance(down, Packed)):
        return False
    return gate.layout == up.layout and experts.gate.rows % UNIT == 0 and experts.down.rows % UNIT == 0


def parts(packed: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel takes of a matrix."""
    return packed.words, packed.high, packed.scales, packed.shared


def form(packed: Packed) -> dict[str, int]:
    """What a kernel is compiled for."""
    layout = packed.layout
    return {
        "OFFSET": layout.offset, "GROUP": layout.group, "FORM": int(layout.form), "SCALES": int(layout.scales)
    }  # fmt: skip


def opening_shares(units: int) -> int:
    """Warps that share rows of a single row's gates, as was fastest on an H200: two blocks for each."""
    return min(8, int(triton.next_power_of_2(-(-units // 8))))


def closing_shares(blocks: int) -> int:
    """The same where a single row's experts are summed, by blocks of all of them."""
    return 16 if blocks >= 32 else 8 if blocks >= 16 else 2


def biases(ends: Ends, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """Of gates and of what they let through."""
    return (
        otherwise if ends.gate_bias is None else ends.gate_bias,
        otherwise if ends.up_bias is None else ends.up_bias,
    )


def open_several(source: Source, experts: Experts, groups: Groups, ends: Ends) -> Operand:
    """What gates let through, in the form that the second products read; all else is let go."""
    gate, up, used = experts.gate, experts.up, experts.routing.num_used
    x = gathered(source, groups, used) if isinstance(gate.held, Packed) or isinstance(up.held, Packed) else None
    floats = floats_of(source)
    both = [
        product(floats if x is None or isinstance(matrix.held, Plain) else x, matrix, groups, used, bias)
        for matrix, bias in ((gate, ends.gate_bias), (up, ends.up_bias))
    ]
    opened: Operand = let_through(both[0], both[1], experts.down, groups, ends)
    return opened


def product(x: Operand, matrix: ExpertMatrices, groups: Groups, per_row: int, bias: Tensor | None) -> Tensor:
    """[pairs, rows] products of pairs with their experts' matrices. x: in slots; or floats, per_row pairs a row."""
    y = torch.empty(len(groups.slots), matrix.rows, dtype=torch.float32, device=groups.slots.device)
    grid = (-(-matrix.rows // PER_PROGRAM), len(groups.item_experts))
    some_bias, has_bias = y if bias is None else bias, bias is not None
    if isinstance(x, Tensor):
        assert isinstance(matrix.held, Plain)
        products.plain_kernel[grid](
            x, *groups.items, groups.pairs, matrix.held.values, some_bias, y, x.stride(0), matrix.rows, matrix.cols,
            PER_ROW=per_row, EACH=groups.each, M=max(16, groups.each), HAS_BIAS=has_bias, num_warps=4,
        )  # fmt: skip
        return y
    units, tiles = units_of(matrix.cols), -(-matrix.rows // TILE_ROWS)
    if isinstance(x, Many):
        products.many_kernel[(-(-matrix.rows // MANY_AT_ONCE), grid[1])](
            x.words, x.marks, *groups.items, groups.pairs, *parts(matrix.packed), some_bias, y,
            *matrix.packed.layout.packed_table, units=units, rows=matrix.rows, tiles=tiles, EACH=groups.each,
            N=MANY_AT_ONCE, HAS_BIAS=has_bias, **form(matrix.packed), num_warps=8 if groups.each > 64 else 4,
        )  # fmt: skip
        return y
    products.few_kernel[(-(-tiles // WARPS), grid[1])](
        x.words, x.sums, x.scales, *groups.items, groups.pairs, *parts(matrix.packed), some_bias, y,
        len(matrix.packed.words) - 1, *matrix.packed.layout.packed_table,
        units=units, rows=matrix.rows, tiles=tiles, N=x.together, WARPS=WARPS, HAS_BIAS=has_bias,
        **steps_of(x.together, units % 8 == 0, matrix.packed.layout.group), **form(matrix.packed),
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def close_one(
    x: Halves, chosen: Tensor, weights: Tensor, experts: Experts, ends: Ends, residual: Tensor | None,
    following: Next | None,
) -> Tensor:  # fmt: skip
    """(residual +) Σ weight · down(x) of a row's experts: [1, out]."""
    down, used = experts.down, experts.routing.num_used
    y = torch.empty(1, down.rows, dtype=torch.float32, device=x.words.device)
    next_weight, words, marks, squares = next_parts(following, y)
    out_units = units_of(down.rows)
    shares = closing_shares(used * units_of(down.cols) // 4)
    products.closing_one_kernel[(out_units if following is not None else down.rows // PER_PROGRAM,)](
        x.words, x.marks, chosen, weights, *parts(down.packed), y if ends.down_bias is None else ends.down_bias,
        y if residual is None else residual, y, next_weight, words, marks, squares, *down.packed.layout.packed_table,
        units=units_of(down.cols), rows=down.rows, out_units=out_units, NUM_USED=used, SHARES=shares,
        HAS_BIAS=ends.down_bias is not None, HAS_RESIDUAL=residual is not None, HAS_NEXT=following is not None,
        **form(down.packed), num_warps=2 * shares, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip
    return y


def summed(parts: Tensor, weights: Tensor, residual: Tensor | None, following: Next | None) -> Tensor:
    """(residual +) Σ weight · part in the order of ranks: [rows, out]; following: of a single row."""
    rows, used = weights.shape
    assert following is None or rows == 1, rows
    width = parts.shape[1]
    y = torch.empty(rows, width, dtype=torch.float32, device=parts.device)
    next_weight, words, marks, squares = next_parts(following, y)
    units = units_of(width)
    routes.sum_kernel[(rows, -(-units // LINES))](
        parts, weights, y if residual is None else residual, y, next_weight, words, marks, squares,
        0 if residual is None else residual.stride(0), width, units,
        NUM_USED=used, LINES=LINES, HAS_RESIDUAL=residual is not None, HAS_NEXT=following is not None, num_warps=4,
    )  # fmt: skip
    return y


def next_parts(following: Next | None, otherwise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight of the norm that follows, words, marks and squares of what it reads."""
    if following is None:
        return (otherwise,) * 4
    halves = following.halves
    assert halves.squares is not None
    return following.weight, halves.words, halves.marks, halves.squares
