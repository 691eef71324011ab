"""Writing GGUF files for tests: whole ones through the `gguf` package, malformed ones byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
    """One metadata entry."""
    return text(name) + struct.pack("<I", value_type) + payload


def array(element_type: int, count: int, payload: bytes) -> bytes:
    """The payload of an array entry."""
    return struct.pack("<IQ", element_type, count) + payload


def tensor(
    name: str | bytes, dimensions: Sequence[int], type_id: int = 0, offset: int = 0, num_dimensions: int | None = None
) -> bytes:
    """One row of the tensor table; dimensions in the file's order, contiguous first."""
    count = len(dimensions) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", count, *dimensions, type_id, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the two counts may lie."""
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def write_checkpoint(
    path: Path, tensors: Mapping[str, np.ndarray], architecture: str = "llama", **metadata: object
) -> Path:
    """A valid float32 checkpoint written by the `gguf` package; metadata keys have `__` for `.`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        dotted = name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(dotted, value)
        elif isinstance(value, int):
            writer.add_uint32(dotted, value)
        elif isinstance(value, float):
            writer.add_float32(dotted, value)
        elif isinstance(value, str):
            writer.add_string(dotted, value)
        else:
            writer.add_array(dotted, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shards(folder: Path, count: int = 3, said_tensors: int | None = None, same_name: bool = False) -> list[Path]:
    """A split checkpoint of `count` shards with one float32 tensor each, named and numbered as upstream does it.

    Faults on request: a wrong total of tensors, one tensor name in every shard.
    """
    paths = []
    for index in range(count):
        path = folder / f"model-{index + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count if said_tensors is None else said_tensors)
        writer.add_tensor(f"blk.{0 if same_name else index}.attn_norm.weight", np.full(32, index, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths
