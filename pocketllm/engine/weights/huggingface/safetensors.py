"""Reads safetensors files: a JSON header, then the tensors' bytes, untouched.

Written from the public description of the format. The `safetensors` library hands out arrays of numpy's own types, and
bfloat16 is none: what is wanted here are the bytes as they lie. The header is not believed: every offset is compared
with the shape, the element type and the size of the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.tensor_file import TensorFile
from pocketllm.errors import CheckpointError

MOST_HEADER_BYTES = 100_000_000
"""The library's own limit."""
PLAIN = ("F32", "F16", "BF16")
"""Element types that are quant types of the same name."""
DTYPES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}
"""Element types that are read, with bytes of an element; those of a byte are codes and scales of packed weights."""


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
    """One open file: header read, data still in the file."""

    path: Path
    num_bytes: int
    tensors: Mapping[str, StoredTensor]
    _file: TensorFile

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor, read from the file; CheckpointError where they are no longer there."""
        tensor = self.tensors[name]
        return self._file.read(name, tensor.start, tensor.num_bytes)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is no longer the one that was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self._file.close()


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a file and read its header; CheckpointError in a sentence for one that is damaged or has other types."""
    file = TensorFile(path)
    try:
        return SafetensorsFile(path, file.num_bytes, _tensors(file), file)
    except BaseException:
        file.close()
        raise


def _tensors(file: TensorFile) -> dict[str, StoredTensor]:
    name, size = file.path.name, file.num_bytes
    if size < 8:
        raise CheckpointError(f"{name} has only {size} bytes: fetch or copy it again")
    length = int.from_bytes(file.read("header", 0, 8), "little")
    if length > min(size - 8, MOST_HEADER_BYTES):
        raise CheckpointError(f"{name} says its header has {length} bytes, but the file has {size}: copy it again")
    try:
        header = json.loads(file.read("header", 8, length).tobytes())
        rows = {key: row for key, row in header.items() if key != "__metadata__"}
        return {key: _stored(name, key, row, 8 + length, size) for key, row in rows.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: its header is no JSON object of tensors: copy it again") from error


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
