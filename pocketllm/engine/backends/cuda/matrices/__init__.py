"""Matrices in GPU memory: packed by the layout of their quant type, or plain floats; several may become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import LAYOUTS, TILE_ROWS
from pocketllm.engine.backends.cuda.matrices import uploads
from pocketllm.engine.backends.cuda.matrices.repacking import READINGS, new_packed, repack
from pocketllm.engine.backends.cuda.matrices.uploads import Array, Source, Uploads, spans
from pocketllm.engine.backends.cuda.packing import Packed
from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.engine.weights.tensor_file import Stored

ELEMENTS_AT_ONCE = 1 << 24
"""Values that torch takes apart in one go at load: what that takes beside the weights is some ten bytes for each."""
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


class Held:
    """Numbers in device memory, some of which may still have to come: whoever asks for them waits until they can be
    used by what is asked of the device next."""

    def __init__(self, held: Packed | Plain, coming: Uploads | None = None) -> None:
        self._held, self._coming = held, coming
        self._num_failures = 0 if coming is None else coming.num_failures

    @property
    def held(self) -> Packed | Plain:
        if self._coming is not None:
            self._coming.finish()
            if self._coming.num_failures > self._num_failures:
                raise RuntimeError("the load that this matrix was part of has failed")
            self._coming = None
        return self._held

    @held.setter
    def held(self, held: Packed | Plain) -> None:
        self._held = held


class Matrix(Held):
    """What `load_matrix` hands out; where its numbers lie may change when matrices are put together."""

    @property
    def rows(self) -> int:
        return self._held.rows

    @property
    def cols(self) -> int:
        return self._held.cols


class ExpertMatrices(Held):
    """What `load_experts` hands out: [experts, rows, cols], one matrix under another; packed, each is filled up to
    whole tiles."""

    def __init__(self, held: Packed | Plain, experts: int, rows: int, cols: int, coming: Uploads | None = None) -> None:
        super().__init__(held, coming)
        self.experts, self.rows, self.cols = experts, rows, cols

    @property
    def packed(self) -> Packed:
        """What is held, where that is packed."""
        assert isinstance(self.held, Packed)
        return self.held

    def with_held(self, held: Packed | Plain) -> "ExpertMatrices":
        """The same with its numbers elsewhere."""
        return ExpertMatrices(held, self.experts, self.rows, self.cols)


Bytes = npt.NDArray[np.uint8] | Stored
"""Of a file: read, or still there."""


def load(data: Bytes, quant_type: str, shape: tuple[int, int], to: torch.device | Uploads) -> Matrix:
    """Copy a matrix's file bytes to the device and bring them into their layout there, a piece at a time.

    to: where; with uploads what is stored is still being read when this returns.
    """
    coming = to if isinstance(to, Uploads) else Uploads(to)
    return Matrix(begin(data, quant_type, shape, coming), coming)


def load_experts(
    data: Bytes, quant_type: str, shape: tuple[int, int, int], to: torch.device | Uploads
) -> ExpertMatrices:
    """`load` for a matrix of each expert. shape: (experts, rows, cols)."""
    experts, rows, cols = shape
    coming = to if isinstance(to, Uploads) else Uploads(to)
    short = 0 if quant_type in PLAIN else -rows % TILE_ROWS
    if short:
        parts = (data.read() if isinstance(data, Stored) else data).reshape(experts, rows, -1)
        data = np.pad(parts, ((0, 0), (0, short), (0, 0)))
    held = begin(data, quant_type, (experts * (rows + short), cols), coming)
    return ExpertMatrices(held, *shape, coming)


def begin(data: Bytes, quant_type: str, shape: tuple[int, int], coming: Uploads) -> Packed | Plain:
    """Room for a matrix that is filled when its pieces have been read. An array may be changed afterwards."""
    make = begin_plain if quant_type in PLAIN else begin_packed
    if isinstance(data, Stored):
        return make(data, quant_type, shape, coming)
    kind = BY_NAME[quant_type]
    row_bytes = shape[1] // kind.block_elements * kind.block_bytes
    held = make(Array(np.ascontiguousarray(data).reshape(shape[0] * row_bytes)), quant_type, shape, coming)
    coming.read_all()
    return held


def begin_packed(source: Source, quant_type: str, shape: tuple[int, int], coming: Uploads) -> Packed:
    """Whole tiles of rows at a time."""
    rows, cols = shape
    kind = BY_NAME[quant_type]
    blocks = cols // kind.block_elements
    width = blocks * kind.block_bytes
    most = uploads.PIECE_BYTES // width
    if quant_type not in READINGS or coming.device.type != "cuda":
        most = min(most, ELEMENTS_AT_ONCE // cols)
    packed = new_packed(LAYOUTS[quant_type], rows, cols, coming.device)

    def use(first: int, memory: Tensor) -> None:
        at_device = memory.to(coming.device, non_blocking=True)
        repack(at_device.view(-1, blocks, kind.block_bytes), quant_type, packed, first)

    for tile, end in spans(-(-rows // TILE_ROWS), most // TILE_ROWS):
        first, last = tile * TILE_ROWS, min(rows, end * TILE_ROWS)
        coming.add(source, first * width, (last - first) * width, partial(use, first))
    return packed


def begin_plain(source: Source, quant_type: str, shape: tuple[int, int], coming: Uploads) -> Plain:
    """Floats as they lie in the file."""
    values = torch.empty(shape, dtype=PLAIN[quant_type], device=coming.device)
    flat = values.view(-1).view(torch.uint8)

    def use(first: int, memory: Tensor) -> None:
        flat[first : first + len(memory)].copy_(memory, non_blocking=True)

    for first, last in spans(len(flat), uploads.PIECE_BYTES):
        coming.add(source, first, last - first, partial(use, first))
    return Plain(values)


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
