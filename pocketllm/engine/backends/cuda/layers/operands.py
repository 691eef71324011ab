"""Rows as operations hand them on: tensors, or what is computed where it is read."""

import torch
from torch import Tensor

from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.cuda.attention import Heads
from pocketllm.engine.backends.cuda.kernels.rows import write_rows
from pocketllm.engine.backends.cuda.mixtures.groups import Normed
from pocketllm.engine.backends.cuda.mixtures.layer import Mixed
from pocketllm.engine.backends.cuda.products import Attended, Gated, Part, Sum

SILU, GELU, SIGMOID, PRODUCT, LIMITED = 1, 2, 3, 4, 6
"""Of `Gated`, what is done to the gate: `kernels.rows.gated_by`."""
Rows = Tensor | Gated | Heads | Attended | Sum | Part | Normed | Mixed


def may_take(q: Heads, k: Heads) -> bool:
    """Whether keys are normed and rotated as queries are, so that one kernel does both."""
    return q.constants() == k.constants() and q.angles is k.angles


def normed(x: Tensor, norm: Norm) -> Tensor | Heads:
    """Whole rows, or heads of them, which are normed where they are read."""
    width = len(norm.weight)
    if width < x.shape[1]:
        return Heads(x, width, norm)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    write_rows(out, x, weight=norm.weight, eps=norm.eps)
    return out


def to_route(x: Rows) -> Tensor | Normed:
    """Rows of a mixture: as a tensor, or to be normed still."""
    return x if isinstance(x, Normed) else written(x)


def part_of(x: Rows) -> Tensor | Part:
    """A factor of a gate: put off still, or as a tensor."""
    return x if isinstance(x, Part) else written(x)


def written(x: Rows) -> Tensor:
    """Rows as a tensor."""
    if isinstance(x, Heads | Sum | Part | Mixed):
        return x.written()
    if isinstance(x, Normed):
        return written(normed(x.x.written(), x.norm))
    if isinstance(x, Attended):
        return x.x
    if isinstance(x, Gated):
        gate, up = x.operands()
        out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
        write_rows(out, gate, up=up, gate=x.kind, limit=x.limit)
        return out
    return x
