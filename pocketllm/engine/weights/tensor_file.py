"""An open file of tensors, which may be no such file, or be cut short or written to while it is read.

Tensors are read, not mapped: a page of a mapping that the file has lost ends the process with SIGBUS, a read that comes
back short is an error like any other.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from pocketllm.errors import CheckpointError

MOST_BYTES_AT_ONCE = 1 << 30
"""Linux reads at most 2 GiB in one call."""
_ADVICE: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull` where it came from"),
    (b"PK\x03\x04", "looks like a zip archive (a wheel or a PyTorch checkpoint): unpack or convert it to GGUF first"),
    (b"\x1f\x8b", "looks like a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "looks like a zstandard archive: unpack it first"),
    (b"tjgg", "is an old GGML file (ggjt), from before GGUF: convert the original model again"),
    (b"lmgg", "is an old GGML file (ggml), from before GGUF: convert the original model again"),
    (b"fmgg", "is an old GGML file (ggmf), from before GGUF: convert the original model again"),
    (b"FUGG", "starts with GGUF spelled backwards: a big-endian file, convert it to little-endian first"),
    (b"\x89HDF", "looks like an HDF5 file: convert the original model to GGUF"),
    (b"\x80\x02", "looks like a Python pickle (a PyTorch checkpoint): convert it to GGUF first"),
)


class TensorFile:
    """One file, open for reading; `num_bytes` is its size when it was opened. Reading is safe in any thread.

    Raises CheckpointError, in a sentence, for a file that cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
            facts = os.fstat(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot open {path.name}: {(error.strerror or str(error)).lower()}") from error
        self.num_bytes = facts.st_size
        self._written_ns = facts.st_mtime_ns

    def read(self, name: str, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, or the header's, read-only, in memory of their own.

        name: of the tensor, or "header", for the sentence of the CheckpointError where the file is closed or ends
        before its bytes.
        """
        data = np.empty(num_bytes, np.uint8)
        self.read_into(data, name, start)
        data.flags.writeable = False
        return data

    def read_into(self, memory: npt.NDArray[np.uint8], name: str, start: int) -> None:
        """Fill memory of the caller's with as many of a tensor's bytes; errors as of `read`."""
        if self._file.closed:
            raise CheckpointError(f"{self.path.name} is closed: open the checkpoint again to read {name!r}")
        view, done, num_bytes = memory.data, 0, memory.nbytes
        try:
            while done < num_bytes:
                count = os.preadv(self._file.fileno(), [view[done : done + MOST_BYTES_AT_ONCE]], start + done)
                if not count:
                    raise self._changed(f"{name!r} needs bytes {start} to {start + num_bytes}")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path.name}: cannot read {name!r}: {error.strerror or error}") from error

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file was cut, grew or was written to since it was opened."""
        facts = os.fstat(self._file.fileno())
        if (facts.st_size, facts.st_mtime_ns) != (self.num_bytes, self._written_ns):
            raise self._changed(f"it had {self.num_bytes} bytes")

    def _changed(self, what: str) -> CheckpointError:
        size = os.fstat(self._file.fileno()).st_size
        return CheckpointError(
            f"{self.path.name} was changed while it was being loaded: {what}, and now the file has {size} bytes; "
            "fetch or copy it again, and start again when nothing writes to it"
        )

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


@dataclass(frozen=True)
class Stored:
    """A tensor's bytes that are still in their file: whoever needs them says where to, in any thread."""

    file: TensorFile
    name: str
    start: int
    num_bytes: int

    def read(self) -> npt.NDArray[np.uint8]:
        """All of them, read-only."""
        return self.file.read(self.name, self.start, self.num_bytes)

    def read_into(self, memory: npt.NDArray[np.uint8], first: int) -> None:
        """Fill memory with the bytes from `first` on; CheckpointError where they are no longer there."""
        assert first + memory.nbytes <= self.num_bytes, (first, memory.nbytes, self)
        self.file.read_into(memory, self.name, self.start + first)


def looks_like(start: bytes) -> str:
    """What a file is instead: the rest of `FILE is not a GGUF file: it …`, from up to 512 first bytes."""
    for magic, advice in _ADVICE:
        if start.startswith(magic):
            return advice
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page: the download was answered with an error or a login page, fetch it again"
    # safetensors: the length of a JSON header as uint64, then the header
    if len(start) > 9 and int.from_bytes(start[:8], "little") < 2**40 and start[8:9] == b"{":
        return "looks like a safetensors file: give the directory with its config.json, or convert it to GGUF"
    if text.startswith(b"{"):
        return "looks like JSON: give the .gguf file itself"
    if not start.strip(b"\x00"):
        return "starts with zeros only: the download was not finished, fetch it again"
    return f"starts with {start[:4].decode('latin-1')!r} instead of 'GGUF'"
