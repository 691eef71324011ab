"""Reads safetensors files: a JSON header, then the tensors' bytes, mapped and untouched.

Written from the public description of the format. The `safetensors` library hands out arrays of numpy's own types, and
bfloat16 is none: what is wanted here are the bytes as they lie. The header is not believed: every offset is compared
with the shape, the element type and the size of the file.
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.errors import CheckpointError

MOST_HEADER_BYTES = 100_000_000
"""The library's own limit."""
DTYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""Element types that are read, with bytes of an element; each is a quant type of the same name."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header describes it; `start` is an absolute offset in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass
class SafetensorsFile:
    """One open file: header read, data mapped."""

    path: Path
    num_bytes: int
    tensors: Mapping[str, StoredTensor]
    _map: mmap.mmap | None

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor: a read-only view of the mapped file."""
        if self._map is None:
            raise CheckpointError(f"{self.path.name} is closed: open the checkpoint again to read {name!r}")
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)

    def forget(self, name: str) -> None:
        """Take a tensor's pages out of this process's memory; whoever looks at them again has them read again."""
        tensor = self.tensors[name]
        first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.start + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Let the file go; views that are still held keep their bytes."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        try:
            mapped.close()
        except BufferError:
            return  # the map goes when the last view does


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map a file and read its header; CheckpointError in a sentence for one that is damaged or has other types."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise CheckpointError(f"{path.name} has only {size} bytes: fetch or copy it again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot open {path.name}: {(error.strerror or str(error)).lower()}") from error
    length = int.from_bytes(mapped[:8], "little")
    if length > min(size - 8, MOST_HEADER_BYTES):
        raise CheckpointError(f"{path.name} says its header has {length} bytes, but the file has {size}: copy it again")
    try:
        header = json.loads(mapped[8 : 8 + length])
        rows = {name: row for name, row in header.items() if name != "__metadata__"}
        tensors = {name: _stored(path.name, name, row, 8 + length, size) for name, row in rows.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header is no JSON object of tensors: copy it again") from error
    return SafetensorsFile(path, size, tensors, mapped)


def _stored(file: str, name: str, row: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(row["dtype"]), tuple(row["shape"]), row["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name!r:.80} is not described by dtype, shape and offsets") from error
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{file}: tensor {name!r:.80} has a shape or offsets that are no whole numbers")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r:.80} has element type {dtype}; this version reads {', '.join(DTYPES)}"
        )
    if end - begin != prod(shape) * DTYPES[dtype] or data_start + end > size:
        raise CheckpointError(
            f"{file}: tensor {name!r:.80} of shape {list(shape)} in {dtype} cannot be bytes {begin} to {end} "
            f"of {size - data_start}: the file was cut or damaged, copy it again"
        )
    return StoredTensor(name, dtype, shape, data_start + begin, end - begin)
