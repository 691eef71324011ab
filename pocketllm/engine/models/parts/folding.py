"""Checkpoints whose matrices were multiplied by a Hadamard rotation of their input before they were rounded.

The keys `prism.hadamard.*` of Ternary-Bonsai's files. `FoldedOps` rotates what such a matrix multiplies, so that a
family computes as if the file held the matrices themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.models.blocks import Binder
from pocketllm.engine.models.header import is_list, short

PREFIX = "prism.hadamard."
KNOWN = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
}
"""What this file says there is no other way of."""


@dataclass(frozen=True)
class Folding:
    """Which tensors of a checkpoint are folded, and how."""

    block: int
    signs: Mapping[int, npt.NDArray[np.float32]]
    """By the width of what is rotated."""
    names: frozenset[str]
    """Matrices whose input is to be rotated, by their full names."""
    inverse_names: frozenset[str]
    """Tables whose rows are to be rotated back."""
    is_grouped: bool
    """Whether what goes into `ssm_out` is ordered by key head, unlike the other tensors of a DeltaNet layer."""


def read_folding(metadata: Mapping[str, Any]) -> Folding | None:
    """The folding that a header tells of, once `folding_problems` has none; None: nothing is folded."""
    if not is_folded(metadata):
        return None
    widths = [int(width) for width in metadata[f"{PREFIX}sign_widths"]]
    values = np.array(metadata[f"{PREFIX}sign_values"], np.float32)
    ends = np.cumsum(widths)
    return Folding(
        block=int(metadata[f"{PREFIX}block_size"]),
        signs={width: values[end - width : end] for width, end in zip(widths, ends, strict=True)},
        names=frozenset(metadata[f"{PREFIX}weight_names"]),
        inverse_names=frozenset(metadata.get(f"{PREFIX}inverse_weight_names", ())),
        is_grouped=bool(metadata.get(f"{PREFIX}gdn_v_grouped", False)),
    )


def is_folded(metadata: Mapping[str, Any]) -> bool:
    """Whether a header has any key of a folding."""
    return any(key.startswith(PREFIX) for key in metadata)


def folding_problems(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """Why a folding cannot be undone; empty when it can, or when there is none."""
    if not is_folded(metadata):
        return []
    found = {name: metadata.get(f"{PREFIX}{name}") for name in KNOWN}
    problems = [
        f"metadata key {PREFIX}{name} is {short(value)}: only {KNOWN[name]!r} is known"
        for name, value in found.items()
        if value != KNOWN[name]
    ]
    return problems or bad_signs(metadata) or bad_names(metadata, tensors)


def bad_signs(metadata: Mapping[str, Any]) -> list[str]:
    """Block size, widths and signs that do not go together."""
    block = metadata.get(f"{PREFIX}block_size")
    if not isinstance(block, int) or block < 1 or block & (block - 1):
        return [f"metadata key {PREFIX}block_size is {short(block)}: it must be a power of two"]
    widths, values = metadata.get(f"{PREFIX}sign_widths"), metadata.get(f"{PREFIX}sign_values")
    if not is_list(widths) or any(not isinstance(width, int) or width < 1 or width % block for width in widths):
        return [f"metadata key {PREFIX}sign_widths is {short(widths)}: it must be widths that {block} divides"]
    if not is_list(values) or len(values) != sum(widths) or any(value not in (1, -1) for value in values):
        return [f"metadata key {PREFIX}sign_values must be {sum(widths)} values of 1 and -1, the widths' together"]
    return []


def bad_names(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """Folded tensors that are no matrices, or whose width has no signs."""
    problems = []
    for key in ("weight_names", "inverse_weight_names"):
        names = metadata.get(f"{PREFIX}{key}", () if key.startswith("inverse") else None)
        if not is_list(names):
            problems.append(f"metadata key {PREFIX}{key} is {short(names)}: it must be names of tensors")
            continue
        absent = [name for name in names if name not in tensors or len(tensors[name].shape) != 2]
        widths = metadata[f"{PREFIX}sign_widths"]
        unsigned = [name for name in names if name not in absent and tensors[name].shape[-1] not in widths]
        if absent:
            problems.append(f"metadata key {PREFIX}{key} names {absent[0]}, which is no matrix of the file")
        if unsigned:
            width = tensors[unsigned[0]].shape[-1]
            problems.append(f"tensor {unsigned[0]} is folded, and {PREFIX}sign_widths has no width {width}")
    return problems


@dataclass(frozen=True)
class FoldedProjection(Projection):
    """A projection whose input is to be rotated."""

    rotation: Hadamard | None = None


@dataclass(frozen=True)
class FoldedTable:
    """An embedding whose rows are to be rotated back."""

    weight: Weight
    rotation: Hadamard


@dataclass(frozen=True)
class FoldedBinder(Binder):
    """Binds tensors, and marks the folded ones."""

    rotations: Mapping[str, Hadamard]
    """By the full name of the tensor."""

    def matrix(self, name: str) -> Weight:
        weight = super().matrix(name)
        return FoldedTable(weight, self.rotations[name]) if name in self.rotations else weight

    def projection(self, name: str) -> Projection:
        projection = super().projection(name)
        if not isinstance(projection.weight, FoldedTable):
            return projection
        return folded(replace(projection, weight=projection.weight.weight), projection.weight.rotation)

    def rows(self, name: str, *parts: npt.NDArray[np.integer]) -> tuple[Projection, ...]:
        rotation = self.rotations.get(f"{name}.weight")
        found = super().rows(name, *parts)
        return found if rotation is None else tuple(folded(part, rotation) for part in found)

    def head(self, embedding: Weight) -> Projection:
        """A row that was folded for looking up is folded for multiplying, too: the rotation is orthogonal."""
        head = super().head(embedding)
        if not isinstance(head.weight, FoldedTable):
            return head
        return folded(replace(head, weight=head.weight.weight), head.weight.rotation)


def folded(projection: Projection, rotation: Hadamard) -> FoldedProjection:
    """The same, of an input that is to be rotated."""
    return FoldedProjection(projection.weight, projection.bias, rotation, is_wide=projection.is_wide)


class FoldedOps:
    """A backend's operations, with the input of folded matrices rotated; everything else is the backend's own."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(self._ops, name))

    def embed(self, table: Weight | FoldedTable, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Tensor:
        if not isinstance(table, FoldedTable):
            return self._ops.embed(table, input_ids, scale)
        return self._ops.hadamard(self._ops.embed(table.weight, input_ids, scale), table.rotation, inverse=True)

    def project(self, x: Tensor, *projections: Projection, norm: Norm | None = None) -> tuple[Tensor, ...]:
        """Projections of one call have one width, and so one rotation: it is made once."""
        rotations = [getattr(projection, "rotation", None) for projection in projections]
        if not any(rotations):
            return self._ops.project(x, *projections, norm=norm)
        plain = x if norm is None else self._ops.rms_norm(x, norm)
        [rotation] = {id(one): one for one in rotations if one is not None}.values()
        rotated = self._ops.hadamard(plain, rotation)
        results: list[Tensor] = [None] * len(projections)
        for source, is_rotated in ((plain, False), (rotated, True)):
            places = [at for at, one in enumerate(rotations) if (one is not None) is is_rotated]
            if places:
                some = self._ops.project(source, *(projections[at] for at in places))
                for at, result in zip(places, some, strict=True):
                    results[at] = result
        return tuple(results)

    def project_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        rotation = getattr(projection, "rotation", None)
        return self._ops.project_add(x if rotation is None else self._ops.hadamard(x, rotation), projection, residual)


def folded_binder(bind: Binder, folding: Folding) -> FoldedBinder:
    """The same tensors, the folded ones marked, over operations that know what to do with them."""
    shared = {width: Hadamard(folding.block, bind.ops.load_vector(signs)) for width, signs in folding.signs.items()}
    names = folding.names | folding.inverse_names
    rotations = {name: shared[bind.checkpoint.tensors[name].shape[-1]] for name in names}
    return FoldedBinder(bind.checkpoint, cast(Ops, FoldedOps(bind.ops)), bind.eps, rotations, wide=bind.wide)
