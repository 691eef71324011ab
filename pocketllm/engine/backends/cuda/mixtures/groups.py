"""Rows that a mixture reads, their routes, and pairs of rows and experts put together by expert."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.mixture import Gating, Routing
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.kernels.several import AT_ONCE, Several, new_several
from pocketllm.engine.backends.cuda.layouts import UNIT
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Plain
from pocketllm.engine.backends.cuda.mixtures.kernels import routes
from pocketllm.engine.backends.cuda.packing import units_of
from pocketllm.engine.backends.cuda.products import Rows, Sum

GATINGS = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SQRT_SOFTPLUS: 2}
NO_GATE, SILU, GELU, BOUNDED, LIMITED = 0, 1, 2, 5, 6
TO_FEW, TO_MANY, TO_FLOATS = 0, 1, 2
INVARIANT_ROOM = 64
"""Pairs in an item of a prompt where that is always the same; part of the numerics version."""


@dataclass(frozen=True)
class Ends:
    """What experts do beside their products."""

    gate: int = SILU
    slope: float = 0.0
    limit: float = 0.0
    gate_bias: Tensor | None = None
    """[experts, inner]; where it is there, so are the two others"""
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scale: Tensor | None = None
    """[experts]"""


@dataclass(frozen=True)
class Normed:
    """norm(x), computed where it is read, since the product before it may be what writes it."""

    x: Sum
    norm: Norm

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Source:
    """Rows as a mixture reads them: floats and the norm that they are still to have."""

    x: Tensor
    norm: Norm | None
    rows: Rows | None = None
    """The same in other forms, of a row by itself."""

    def norm_options(self) -> tuple[Tensor, float, bool]:
        """Weight, epsilon, whether there is a norm."""
        return (self.x, 0.0, False) if self.norm is None else (self.norm.weight, self.norm.eps, True)


def source_of(x: Tensor | Normed, is_one: bool) -> Source:
    """is_one: what a single row's products read is wanted too."""
    if isinstance(x, Tensor):
        return Source(x, None, Rows(x) if is_one else None)
    rows = (x.x.normed(x.norm) or Rows(x.x.written(), x.norm)) if is_one else None
    return Source(x.x.written(), x.norm, rows)


@dataclass(frozen=True)
class Many:
    """Rows in slots as float16 in another order, times a power of two each (`kernels.routes.gather_kernel`)."""

    words: Tensor
    marks: Tensor


@dataclass(frozen=True)
class Groups:
    """Pairs by expert (`kernels.routes`)."""

    chosen: Tensor
    weights: Tensor
    slots: Tensor
    pairs: Tensor
    item_experts: Tensor
    item_counts: Tensor
    num_items: Tensor
    each: int
    """Pairs that an item has room for"""
    are_many: bool
    """Whether products are those of prompts"""

    @property
    def items(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel takes."""
        return self.item_experts, self.item_counts, self.num_items


def route_options(
    routing: Routing, ends: Ends, logits: Tensor
) -> tuple[Tensor, Tensor, tuple[int, float], dict[str, Any]]:
    """Bias of the choice, scales of experts, numbers and constants that kernels take beside logits."""
    return (
        logits if routing.bias is None else routing.bias,
        logits if ends.scale is None else ends.scale,
        (logits.shape[1], float(routing.scale)),
        {
            "E": triton.next_power_of_2(logits.shape[1]), "GATING": GATINGS[routing.gating],
            "NUM_USED": routing.num_used, "NORMALIZED": routing.normalized, "HAS_CHOICE": routing.bias is not None,
            "HAS_SCALE": ends.scale is not None, "NUM_GROUPS": routing.num_groups,
            "GROUPS_USED": routing.num_groups_used, "BEST": routing.best_of_group,
        },
    )  # fmt: skip


def is_plain(routing: Routing) -> bool:
    """Whether logits tell the order of experts: then they are ranked with little work (`kernels.routes.ranks_of`)."""
    return routing.gating is Gating.SOFTMAX and routing.bias is None and routing.num_groups == 1


def route(
    logits: Tensor, routing: Routing, ends: Ends, chosen: Tensor, weights: Tensor, named: Tensor | None = None
) -> None:
    """Each row's experts, best first, and their weights; named: [rows, num_used] experts that scores do not choose."""
    if named is not None:
        assert routing.gating is not Gating.SOFTMAX, "a softmax is over all experts"
        routes.named_kernel[(len(logits),)](
            logits, named, chosen, weights, logits.shape[1], float(routing.scale),
            USED=triton.next_power_of_2(routing.num_used), GATING=GATINGS[routing.gating],
            NUM_USED=routing.num_used, NORMALIZED=routing.normalized, num_warps=1,
        )  # fmt: skip
        return
    choice, scale, numbers, constants = route_options(routing, ends, logits)
    warps = 4 if is_plain(routing) or constants["E"] <= 128 else 16
    routes.routes_kernel[(len(logits),)](
        logits, choice, scale, chosen, weights, *numbers, **constants, num_warps=warps
    )  # fmt: skip


def grouped(
    logits: Tensor,
    routing: Routing,
    ends: Ends,
    are_many: bool,
    named: Tensor | None = None,
    is_invariant: bool = False,
) -> Groups:
    """Route rows and put their pairs together by expert.

    named: as for `route`; is_invariant: in items whose size no number of rows decides, since the instruction that
    multiplies them goes by it.
    """
    rows, experts = logits.shape
    count, device = rows * routing.num_used, logits.device

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chosen, weights = new(rows, routing.num_used), new(rows, routing.num_used, dtype=torch.float32)
    route(logits, routing, ends, chosen, weights, named)
    each = AT_ONCE if not are_many else INVARIANT_ROOM if is_invariant else room_for(count, experts)
    items = min(count, experts + count // each)
    groups = Groups(chosen, weights, new(count), new(items * each), new(items), new(items), new(1), each, are_many)
    chunk = min(routes.PAIRS_AT_ONCE, triton.next_power_of_2(count))
    routes.groups_kernel[(experts,)](
        chosen, groups.slots, groups.pairs, *groups.items, count,
        E=triton.next_power_of_2(experts), EACH=each, CHUNK=max(chunk, 32), num_warps=4,
    )  # fmt: skip
    return groups


def room_for(pairs: int, experts: int) -> int:
    """Pairs in an item of a prompt, about as many as an expert has."""
    return 32 if pairs <= 24 * experts else 64 if pairs <= 96 * experts else 128


def gathered(source: Source, groups: Groups, used: int) -> Any:
    """Rows where their experts' products read them."""
    weight, eps, has_norm = source.norm_options()
    form = TO_MANY if groups.are_many else TO_FEW
    return gather(source.x, source.x, groups, used, form, eps=eps, weight=weight, has_norm=has_norm)


def floats_of(source: Source) -> Tensor:
    """Rows as floats, normed."""
    if source.norm is None:
        return source.x
    out = torch.empty_like(source.x)
    write_rows(out, source.x, weight=source.norm.weight, eps=source.norm.eps)
    return out


def let_through(gate: Tensor, up: Tensor, down: ExpertMatrices, groups: Groups, ends: Ends) -> Any:
    """What gates let through, in the form that the second products read."""
    form = TO_FLOATS if isinstance(down.held, Plain) else TO_MANY if groups.are_many else TO_FEW
    return gather(gate, up, groups, 1, form, ends=ends)


def gather(
    x: Tensor, up: Tensor, groups: Groups, per_row: int, form: int, *, ends: Ends | None = None,
    weight: Tensor | None = None, eps: float = 0.0, has_norm: bool = False,
) -> Any:  # fmt: skip
    """Rows of x by pairs, per_row for each; gating `up` or normed on the way."""
    (pairs,), (slots,), width = groups.slots.shape, groups.pairs.shape, x.shape[1]
    units = units_of(width)
    out: Any
    if form == TO_FLOATS:
        out = torch.empty(pairs, width, dtype=torch.float32, device=x.device)
    elif form == TO_FEW:
        out = new_several(slots, width, x.device, AT_ONCE)
    else:
        codes = torch.empty(slots, units * UNIT, dtype=torch.float16, device=x.device)
        out = Many(codes, torch.empty(slots, dtype=torch.float32, device=x.device))
    lines = triton.next_power_of_2(units)
    routes.gather_kernel[(pairs,)](
        x, up, x if weight is None else weight, groups.slots,
        *targets_of(out), x.stride(0), up.stride(0), width, units,
        eps, 0.0 if ends is None else ends.slope, 0.0 if ends is None else ends.limit,
        EACH=per_row, LINES=lines, GATE=NO_GATE if ends is None else ends.gate, HAS_NORM=has_norm, TO=form,
        TOGETHER=AT_ONCE,
        num_warps=4 if lines <= 64 else 8,
    )  # fmt: skip
    return out


def targets_of(out: Tensor | Many | Several) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows go, what they are multiples of, and their sums."""
    if isinstance(out, Tensor):
        return out, out, out
    if isinstance(out, Many):
        return out.words, out.marks, out.marks
    return out.as_written
