"""A bounded walk over the bytes of a GGUF header: nothing is believed, nothing is made before it is known to fit."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.errors import GGUFError

VERSIONS = (2, 3)

MAX_KEYS = 65_536
MAX_TENSORS = 131_072
MAX_NAME_BYTES = 65_535
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_ARRAY_ELEMENTS = 4_194_304
"""Elements of all arrays of a header together, three times the largest published vocabulary: bounds the walk's time."""
NESTED_ARRAY_COST = 8
"""An array in an array is that many elements dear."""
MAX_HEADER_BYTES = 256 * 2**20
"""Ten times the largest published header: bounds what is held of a file whose lengths are wrong."""
FIRST_BYTES = 2**20

STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
SCALARS: Mapping[int, tuple[str, str, int]] = {
    0: ("uint8", "<u1", 1),
    1: ("int8", "<i1", 1),
    2: ("uint16", "<u2", 2),
    3: ("int16", "<i2", 2),
    4: ("uint32", "<u4", 4),
    5: ("int32", "<i4", 4),
    6: ("float32", "<f4", 4),
    7: ("bool", "|b1", 1),
    10: ("uint64", "<u8", 8),
    11: ("int64", "<i8", 8),
    12: ("float64", "<f8", 8),
}
"""Value type id → name, numpy type, bytes; strings are 8 and arrays are 9."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
ARRAY_HEAD = struct.Struct("<IQ")


@dataclass(frozen=True)
class Value:
    """Where a metadata value lies: its type and the offset of its bytes (for an array, of its element type)."""

    type_id: int
    offset: int


@dataclass(frozen=True)
class RawTensor:
    """A row of the tensor table: dimensions in the file's order, offset from the start of the data."""

    name: str
    dimensions: tuple[int, ...]
    type_id: int
    offset: int


def type_name(type_id: int) -> str:
    """GGUF name of a metadata value type."""
    if type_id in SCALARS:
        return SCALARS[type_id][0]
    return {STRING: "string", ARRAY: "array"}.get(type_id, f"type {type_id}")


def shown(text: str) -> str:
    """A name from a file, quoted and short enough for a sentence."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


class Reader:
    """A bounded walk over the bytes of a header; `buffer` holds the file's first bytes, as far as the walk has come.

    Read and not mapped: a page of a mapping that the file has lost meanwhile ends the process with SIGBUS.
    """

    def __init__(self, name: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """size: of the file, in bytes; read: gives bytes of it, from a start, so many."""
        self.name = name
        self.size = size
        self.buffer = b""
        self.elements = 0
        self._read = read

    def load(self, end: int) -> None:
        """Have the first `end` bytes in the buffer, and twice what was there, so that few reads make a long header."""
        if end > MAX_HEADER_BYTES:
            raise GGUFError(f"{self.name} is damaged: its header would take more than {MAX_HEADER_BYTES >> 20} MiB")
        held = len(self.buffer)
        if end > held:
            self.buffer += self._read(held, min(max(end, 2 * held, FIRST_BYTES), self.size) - held)

    # -- parts of the file ---------------------------------------------------------------------------------------
    def preamble(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of metadata keys."""
        if self.size < 24:
            raise GGUFError(f"{self.name} is truncated: a GGUF starts with 24 bytes, the file has {self.size}")
        self.load(24)
        version = _U32.unpack_from(self.buffer, 4)[0]
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise GGUFError(f"{self.name} is a big-endian GGUF: convert it to little-endian first")
            raise GGUFError(f"{self.name}: GGUF version is {version}, but only 2 and 3 can be read; convert it again")
        num_tensors = _U64.unpack_from(self.buffer, 8)[0]
        num_keys = _U64.unpack_from(self.buffer, 16)[0]
        # a tensor takes at least 8 + 1 + 4 + 4 + 8 bytes, a key 8 + 1 + 4 + 1
        self.bounded("tensor count", num_tensors, MAX_TENSORS, 25, 24)
        self.bounded("metadata key count", num_keys, MAX_KEYS, 14, 24)
        return version, num_tensors, num_keys

    def read_metadata(self, position: int, num_keys: int) -> tuple[dict[str, Value], int]:
        values: dict[str, Value] = {}
        for index in range(num_keys):
            key, position = self.short_text(position, f"metadata key {index}")
            if key in values:
                raise GGUFError(f"{self.name}: metadata key {shown(key)} occurs twice")
            type_id = self.u32(position, f"type of {shown(key)}")
            position += 4
            values[key] = Value(type_id, position)
            position = self.skip(type_id, position, shown(key), 0)
        self.load(position)
        return values, position

    def read_tensor_table(self, position: int, num_tensors: int) -> tuple[list[RawTensor], int]:
        table: list[RawTensor] = []
        names: set[str] = set()
        for index in range(num_tensors):
            name, position = self.short_text(position, f"name of tensor {index}")
            if name in names:
                raise GGUFError(f"{self.name}: tensor {shown(name)} occurs twice")
            names.add(name)
            num_dimensions = self.u32(position, f"dimension count of tensor {shown(name)}")
            if num_dimensions > MAX_DIMENSIONS:
                raise GGUFError(
                    f"{self.name}: tensor {shown(name)} has {num_dimensions} dimensions, "
                    f"but at most {MAX_DIMENSIONS} exist"
                )
            self.need(position + 4, num_dimensions * 8 + 12, f"description of tensor {shown(name)}")
            *dimensions, type_id, offset = struct.unpack_from(f"<{num_dimensions}QIQ", self.buffer, position + 4)
            position += 16 + num_dimensions * 8
            if 0 in dimensions:
                raise GGUFError(f"{self.name}: tensor {shown(name)} has a dimension of 0: {dimensions}")
            table.append(RawTensor(name, tuple(dimensions), type_id, offset))
        return table, position

    # -- bounds ----------------------------------------------------------------------------------------------------
    def need(self, position: int, count: int, field: str) -> None:
        if count > self.size - position:
            raise GGUFError(
                f"{self.name} is truncated or damaged: {field} needs {count} bytes at byte {position}, "
                f"but the file has only {self.size} bytes"
            )
        if position + count > len(self.buffer):
            self.load(position + count)

    def bounded(self, field: str, count: int, most: int, bytes_each: int, position: int) -> None:
        room = max(0, self.size - position) // bytes_each
        if count > min(most, room):
            raise GGUFError(
                f"{self.name} is truncated or damaged: {field} is {count}, "
                f"but at most {min(most, room)} can be in this file of {self.size} bytes"
            )

    def u32(self, position: int, field: str) -> int:
        self.need(position, 4, field)
        return int(_U32.unpack_from(self.buffer, position)[0])

    def u64(self, position: int, field: str) -> int:
        self.need(position, 8, field)
        return int(_U64.unpack_from(self.buffer, position)[0])

    def short_text(self, position: int, field: str) -> tuple[str, int]:
        """A key or a tensor name and the position after it."""
        length = self.u64(position, f"length of {field}")
        if length == 0:
            raise GGUFError(f"{self.name}: {field} is empty")
        if length > MAX_NAME_BYTES:
            raise GGUFError(f"{self.name}: {field} is {length} bytes long, but at most {MAX_NAME_BYTES} are allowed")
        self.need(position + 8, length, field)
        return self.text(position + 8, length, field), position + 8 + length

    def text(self, start: int, length: int, field: str) -> str:
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.name}: {field} is not UTF-8 ({error.reason} at byte {error.start})") from error

    # -- walking over values without making them -----------------------------------------------------------------
    def skip(self, type_id: int, position: int, key: str, depth: int) -> int:
        """The position after a value; every length in it is checked. key: as it is shown in a message."""
        if type_id in SCALARS:
            width = SCALARS[type_id][2]
            self.need(position, width, f"value of {key}")
            if type_id == BOOL and self.buffer[position] > 1:
                raise GGUFError(f"{self.name}: {key} is a bool of {self.buffer[position]}, but must be 0 or 1")
            return position + width
        if type_id == STRING:
            length = self.u64(position, f"length of {key}")
            self.need(position + 8, length, f"text of {key}")
            return position + 8 + length
        if type_id == ARRAY:
            return self.skip_array(position, key, depth + 1)
        raise GGUFError(f"{self.name}: {key} has value type {type_id}, but types end at 12")

    def skip_array(self, position: int, key: str, depth: int) -> int:
        if depth > MAX_ARRAY_DEPTH:
            raise GGUFError(f"{self.name}: {key} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        self.need(position, 12, f"head of array {key}")
        element_type, count = ARRAY_HEAD.unpack_from(self.buffer, position)
        position += 12
        cost = NESTED_ARRAY_COST if element_type == ARRAY else 1
        smallest = SCALARS[element_type][2] if element_type in SCALARS else {STRING: 8, ARRAY: 12}.get(element_type)
        if smallest is None:
            raise GGUFError(f"{self.name}: array {key} has element type {element_type}, but types end at 12")
        field = f"element count of array {key}"
        self.bounded(field, count, (MAX_ARRAY_ELEMENTS - self.elements) // cost, smallest, position)
        self.elements += count * cost
        if element_type == STRING:
            return self.skip_strings(position, count, key)
        if element_type == ARRAY:
            for _ in range(count):
                position = self.skip_array(position, key, depth + 1)
            return position
        return int(position + count * smallest)

    def skip_strings(self, position: int, count: int, key: str) -> int:
        unpack, buffer, last = _U64.unpack_from, self.buffer, len(self.buffer) - 8
        for index in range(count):
            if position > last:
                if position > self.size - 8:
                    where = f"{key} ends at element {index} of {count}"
                    raise GGUFError(f"{self.name} is truncated or damaged: {where}")
                self.load(position + 8)
                buffer, last = self.buffer, len(self.buffer) - 8
            position += 8 + unpack(buffer, position)[0]
        if position > self.size:
            raise GGUFError(f"{self.name} is truncated or damaged: the last text of {key} leaves the file")
        return int(position)

    # -- making values, after the walk has accepted them ----------------------------------------------------------
    def decode(self, type_id: int, position: int, key: str) -> tuple[Any, int]:
        """A value and the position after it."""
        if type_id == STRING:
            length = int(_U64.unpack_from(self.buffer, position)[0])
            return self.text(position + 8, length, shown(key)), position + 8 + length
        if type_id == ARRAY:
            return self.decode_array(position, key)
        _, dtype, width = SCALARS[type_id]
        return np.frombuffer(self.buffer, dtype, 1, position)[0].item(), position + width

    def decode_array(self, position: int, key: str, most: int | None = None) -> tuple[list[Any], int]:
        """The elements (at most `most`, and then the position means nothing) and the position after them."""
        element_type, count = ARRAY_HEAD.unpack_from(self.buffer, position)
        position += 12
        count = count if most is None else min(count, most)
        if element_type in SCALARS:
            _, dtype, width = SCALARS[element_type]
            return np.frombuffer(self.buffer, dtype, count, position).tolist(), position + count * width
        if element_type == STRING:
            return self.decode_strings(position, count, key)
        rows = []
        for _ in range(count):
            row, position = self.decode_array(position, key)
            rows.append(row)
        return rows, position

    def decode_strings(self, position: int, count: int, key: str) -> tuple[list[str], int]:
        unpack, buffer = _U64.unpack_from, self.buffer
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                append(str(buffer[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            field = f"element {len(texts)} of {shown(key)}"
            raise GGUFError(f"{self.name}: {field} is not UTF-8 ({error.reason} at byte {error.start})") from error
        return texts, position
