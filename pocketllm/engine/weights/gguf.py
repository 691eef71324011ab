"""An own reader of GGUF files, versions 2 and 3, little-endian.

Written from the public GGUF specification of the ggml project. A file is never believed: every count, length, offset
and product is compared with the bytes that are really there before anything is made of it, and what does not fit is a
GGUFError that names the file, the field and what was found. Values stay in the file until they are asked for, so a
vocabulary of 262,144 tokens costs a walk over its lengths, and tensor data costs nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.gguf_walk import ARRAY, ARRAY_HEAD, RawTensor, Reader, Value, shown, type_name
from pocketllm.engine.weights.quant_types import BY_ID, QuantType
from pocketllm.engine.weights.tensor_file import Stored, TensorFile, looks_like
from pocketllm.errors import CheckpointError, GGUFError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
LOOKED_AT_BYTES = 512
"""Of a file that is not GGUF, to say what it is."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    `shape` is row-major (the contiguous axis last, the reverse of the file); `num_bytes` is exact for a known type and
    the room up to the next tensor for an unknown one. `start` is an absolute offset in `file`.
    """

    name: str
    shape: tuple[int, ...]
    quant_type: str
    type_id: int
    start: int
    num_bytes: int
    file: Path

    @property
    def num_elements(self) -> int:
        """Values in the tensor."""
        elements = 1
        for dimension in self.shape:
            elements *= dimension
        return elements

    @property
    def has_known_type(self) -> bool:
        """Whether the type's block size is known, decodable or not."""
        return self.type_id in BY_ID


@dataclass(frozen=True)
class ArrayInfo:
    """An array of the metadata, before it is decoded: element type by name and number of elements."""

    element_type: str
    count: int


class Metadata(Mapping[str, Any]):
    """Metadata by key; a value is decoded when it is first asked for, arrays as lists.

    A text that is not UTF-8 is a GGUFError at that moment.
    """

    def __init__(self, reader: Reader, values: dict[str, Value]) -> None:
        self._reader: Reader | None = reader
        self._name = reader.name
        self._values = values
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            value = self._values[key]
            self._decoded[key] = self._open.decode(value.type_id, value.offset, key)[0]
        decoded = self._decoded[key]
        # a list of the caller's own: what one reader does to it must not reach the next
        return list(decoded) if isinstance(decoded, list) else decoded

    @property
    def _open(self) -> Reader:
        if self._reader is None:
            raise CheckpointError(f"{self._name} is closed: open the checkpoint again to read its metadata")
        return self._reader

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array(self, key: str) -> ArrayInfo | None:
        """Element type and length of an array, without decoding it; None when the value is no array."""
        value = self._values[key]
        if value.type_id != ARRAY:
            return None
        element_type, count = ARRAY_HEAD.unpack_from(self._open.buffer, value.offset)
        return ArrayInfo(type_name(element_type), count)

    def head(self, key: str, count: int) -> list[Any]:
        """The first elements of an array, decoding no others."""
        value = self._values[key]
        assert value.type_id == ARRAY, key
        return self._open.decode_array(value.offset, key, most=count)[0]

    def type_name(self, key: str) -> str:
        """GGUF name of the value's type."""
        return type_name(self._values[key].type_id)

    def close(self) -> None:
        """Let the file go; values that were decoded stay."""
        self._reader = None


@dataclass
class GGUFFile:
    """One open GGUF file: header read, data still in the file."""

    path: Path
    version: int
    alignment: int
    num_bytes: int
    data_start: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    _file: TensorFile

    def data(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor, read from the file; CheckpointError where they are no longer there."""
        return self._file.read(tensor.name, tensor.start, tensor.num_bytes)

    def stored(self, tensor: TensorInfo) -> Stored:
        """The same, unread."""
        return Stored(self._file, tensor.name, tensor.start, tensor.num_bytes)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is no longer the one that was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self._file.close()
        self.metadata.close()


def open_gguf(path: Path) -> GGUFFile:
    """Open a file and read its header; raises GGUFError naming the field that is wrong, CheckpointError for no GGUF."""
    file = TensorFile(path)
    try:
        if file.num_bytes == 0:
            raise CheckpointError(f"{path.name} is empty (0 bytes): fetch or copy it again")
        return _read(file)
    except BaseException:
        file.close()
        raise


def _read(file: TensorFile) -> GGUFFile:
    path = file.path
    reader = Reader(path.name, file.num_bytes, lambda start, count: file.read("header", start, count).tobytes())
    reader.load(min(LOOKED_AT_BYTES, reader.size))
    if not reader.buffer.startswith(MAGIC):
        raise CheckpointError(f"{path.name} is not a GGUF file: it {looks_like(reader.buffer[:LOOKED_AT_BYTES])}")
    version, num_tensors, num_keys = reader.preamble()
    values, position = reader.read_metadata(24, num_keys)
    metadata = Metadata(reader, values)
    alignment = _alignment(path.name, metadata)
    raw, position = reader.read_tensor_table(position, num_tensors)
    data_start = -(-position // alignment) * alignment
    tensors = _place(path, raw, data_start, alignment, reader.size)
    reader.buffer = reader.buffer[:position]
    return GGUFFile(path, version, alignment, reader.size, data_start, metadata, tensors, file)


def _alignment(name: str, metadata: Metadata) -> int:
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT
    value = metadata["general.alignment"]
    if metadata.type_name("general.alignment") != "uint32" or value < 1 or value & (value - 1):
        raise GGUFError(f"{name}: general.alignment is {value!r:.40}, but must be a uint32 and a power of two")
    return int(value)


def _place(path: Path, raw: list[RawTensor], data_start: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """Check every tensor against the file and against its neighbor; returns them in the order of the table."""
    in_order = sorted(raw, key=lambda tensor: tensor.offset)
    tensors: dict[str, TensorInfo] = {}
    for index, tensor in enumerate(in_order):
        following = in_order[index + 1] if index + 1 < len(in_order) else None
        start = data_start + tensor.offset
        room_end = data_start + following.offset if following else max(size, start)
        num_bytes = _num_bytes(path.name, tensor)
        if num_bytes is None:
            num_bytes = max(1, min(room_end, size) - start)
        _check_place(path.name, tensor, start, start + num_bytes, alignment, size)
        if following is not None and start + num_bytes > room_end:
            raise GGUFError(
                f"{path.name}: tensors {shown(tensor.name)} and {shown(following.name)} overlap at byte {room_end}"
            )
        quant = BY_ID.get(tensor.type_id)
        tensors[tensor.name] = TensorInfo(
            name=tensor.name,
            shape=tuple(reversed(tensor.dimensions)),
            quant_type=quant.name if quant else f"TYPE_{tensor.type_id}",
            type_id=tensor.type_id,
            start=start,
            num_bytes=num_bytes,
            file=path,
        )
    return {tensor.name: tensors[tensor.name] for tensor in raw}


def _check_place(name: str, tensor: RawTensor, start: int, end: int, alignment: int, size: int) -> None:
    if tensor.offset % alignment:
        raise GGUFError(
            f"{name}: tensor {shown(tensor.name)} starts at offset {tensor.offset}, "
            f"which is not a multiple of the alignment {alignment}"
        )
    if end > size:
        raise GGUFError(
            f"{name} is truncated: tensor {shown(tensor.name)} needs bytes {start} to {end}, "
            f"but the file has only {size} bytes; fetch or copy it again"
        )


def _num_bytes(name: str, tensor: RawTensor) -> int | None:
    """Exact bytes of a tensor; None for a type whose block size is not known."""
    elements = 1
    for dimension in tensor.dimensions:
        elements *= dimension
    if elements >= 2**63:
        raise GGUFError(
            f"{name}: tensor {shown(tensor.name)} has dimensions {list(tensor.dimensions)}, over 2^63 values"
        )
    quant: QuantType | None = BY_ID.get(tensor.type_id)
    if quant is None:
        return None
    row = tensor.dimensions[0] if tensor.dimensions else 1
    if row % quant.block_elements:
        raise GGUFError(
            f"{name}: tensor {shown(tensor.name)} has rows of {row} values, "
            f"which is not a multiple of {quant.name}'s block of {quant.block_elements}"
        )
    return elements // quant.block_elements * quant.block_bytes
