"""Matrices in GPU memory: packed by the layout of their quant type, or plain floats; several may become one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import LAYOUTS, TILE_ROWS
from pocketllm.engine.backends.cuda.matrices.uploads import pieces
from pocketllm.engine.backends.cuda.packing import Packed, pack
from pocketllm.engine.backends.cuda.quant import SPLITS
from pocketllm.engine.weights.quant_types import BY_NAME

ELEMENTS_AT_ONCE = 1 << 24
"""Values taken apart in one go at load: what loading takes beside the weights is some ten bytes for each."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class Plain:
    """A matrix of plain floats, [rows, cols]."""

    values: Tensor

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def cols(self) -> int:
        return int(self.values.shape[1])


class Matrix:
    """What `load_matrix` hands out; where its numbers lie may change when matrices are put together."""

    def __init__(self, held: Packed | Plain) -> None:
        self.held = held

    @property
    def rows(self) -> int:
        return self.held.rows

    @property
    def cols(self) -> int:
        return self.held.cols


def load(data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int], device: torch.device) -> Matrix:
    """Copy a matrix's file bytes to the device and bring them into their layout there, a slice of rows at a time."""
    rows, cols = shape
    if quant_type in PLAIN:
        return Matrix(Plain(load_plain(data, PLAIN[quant_type], shape, device)))
    layout, split = LAYOUTS[quant_type], SPLITS[quant_type]
    kind = BY_NAME[quant_type]
    blocks = np.ascontiguousarray(data).reshape(rows, cols // kind.block_elements, kind.block_bytes)
    step = max(TILE_ROWS, ELEMENTS_AT_ONCE // cols // TILE_ROWS * TILE_ROWS)
    whole: list[Tensor] = []
    padded = -(-rows // TILE_ROWS) * TILE_ROWS
    for at, some in zip(range(0, rows, step), pieces(blocks, step, device), strict=True):
        short = -len(some) % TILE_ROWS
        if short:
            some = torch.cat([some, some.new_zeros(short, *some.shape[1:])])
        parts = pack(split(some), layout)
        if not whole:
            whole = [allocate(part, len(some), padded) for part in parts]
        for target, part in zip(whole, parts, strict=True):
            if part.ndim > 1:
                first = at * len(part) // len(some)
                target[first : first + len(part)] = part
    return Matrix(Packed(layout, rows, cols, *whole))


def load_plain(data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Floats as they lie in the file, [rows, cols]."""
    rows, cols = shape
    values = torch.empty(rows, cols, dtype=dtype, device=device)
    step = max(1, ELEMENTS_AT_ONCE // cols)
    for at, some in zip(range(0, rows, step), pieces(data.reshape(rows, -1), step, device), strict=True):
        values[at : at + step] = some.view(dtype)
    return values


@dataclass(frozen=True)
class ExpertMatrices:
    """What `load_experts` hands out: [experts, rows, cols], one matrix under another."""

    held: Packed | Plain
    """Packed, each matrix is filled up to whole tiles."""
    experts: int
    rows: int
    cols: int

    @property
    def packed(self) -> Packed:
        """What is held, where that is packed."""
        assert isinstance(self.held, Packed)
        return self.held


def load_experts(
    data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int], device: torch.device
) -> ExpertMatrices:
    """`load` for a matrix of each expert. shape: (experts, rows, cols)."""
    experts, rows, cols = shape
    short = 0 if quant_type in PLAIN else -rows % TILE_ROWS
    parts = data.reshape(experts, rows, -1)
    if short:
        parts = np.pad(parts, ((0, 0), (0, short), (0, 0)))
    held = load(parts, quant_type, (experts * (rows + short), cols), device).held
    return ExpertMatrices(held, experts, rows, cols)


def allocate(part: Tensor, rows: int, all_rows: int) -> Tensor:
    """Room for a part of all rows, given that of some; what has no rows stays as it is."""
    return part if part.ndim == 1 else part.new_empty(all_rows * len(part) // rows, *part.shape[1:])


def may_join(matrices: Sequence[Matrix]) -> bool:
    """Whether these can lie one after another as one matrix."""
    held = [matrix.held for matrix in matrices]
    first = held[0]
    if not isinstance(first, Packed):
        return False
    return all(
        isinstance(other, Packed)
        and other.layout == first.layout
        and other.cols == first.cols
        and other.rows % TILE_ROWS == 0
        for other in held
    )


def join(matrices: Sequence[Matrix]) -> Packed:
    """Put matrices together, rows after rows; each of them becomes a view of the whole."""
    held = [matrix.held for matrix in matrices if isinstance(matrix.held, Packed)]
    fields = ("words", "high", "scales", "shared")
    parts = {name: [getattr(each, name) for each in held] for name in fields}
    whole = {name: all_of[0] if all_of[0].ndim == 1 else torch.cat(all_of) for name, all_of in parts.items()}
    joined = Packed(held[0].layout, sum(each.rows for each in held), held[0].cols, **whole)
    at = 0
    for matrix, each in zip(matrices, held, strict=True):
        views = {name: cut(whole[name], at, each.rows, joined.rows) for name in fields}
        matrix.held = Packed(each.layout, each.rows, each.cols, **views)
        at += each.rows
    return joined


def cut(part: Tensor, first: int, rows: int, all_rows: int) -> Tensor:
    """The part of some rows."""
    if part.ndim == 1:
        return part
    share = all_rows // len(part)
    return part[first // share : (first + rows) // share]
