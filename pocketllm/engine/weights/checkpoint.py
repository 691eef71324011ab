"""A checkpoint: one GGUF file, the shards of a split one, or a Hugging Face directory, as one mapping of tensors."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.gguf import Metadata, TensorInfo, open_gguf
from pocketllm.engine.weights.huggingface.directory import is_directory, open_directory
from pocketllm.engine.weights.quant import dequantize
from pocketllm.engine.weights.tensor_file import Stored
from pocketllm.errors import CheckpointError, GGUFError

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_NAMES = 5
"""Names that a sentence lists before it says `and N more`."""


class Part(Protocol):
    """One file of a checkpoint, whatever its format."""

    @property
    def path(self) -> Path: ...

    @property
    def version(self) -> int:
        """GGUF's; 0 for a file of another format."""

    @property
    def alignment(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def metadata(self) -> Metadata: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def data(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor."""

    def stored(self, tensor: TensorInfo) -> Stored | None:
        """The same, unread; None where they do not lie in the file as they are handed out."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is no longer the one that was opened."""

    def close(self) -> None:
        """Let the file go."""


class Checkpoint:
    """An open checkpoint: header checked, tensor data still in the file.

    `tensors` maps names to TensorInfo (row-major shape, quant type by GGUF name, bytes), over all shards; metadata is
    the first shard's. Not thread-safe while it is being closed; reading is.
    """

    def __init__(self, path: Path, parts: Sequence[Part], beside: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._parts = {part.path: part for part in parts}
        self.files: tuple[Path, ...] = (*self._parts, *beside)
        self.version = parts[0].version
        self.alignment = parts[0].alignment
        self.metadata: Metadata = parts[0].metadata
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.tensors: Mapping[str, TensorInfo] = _merged(parts)

    @property
    def architecture(self) -> str:
        """`general.architecture`; GGUFError when it is absent or no text."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise GGUFError(f"{self.path.name}: general.architecture is {value!r:.60}, but must name the architecture")
        return value

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor, read-only: read from the file now.

        LookupError for no such tensor, CheckpointError where the file was cut short since it was opened.
        """
        tensor = self.tensor(name)
        return self._parts[tensor.file].data(tensor)

    def stored(self, name: str) -> Stored | None:
        """What `data` gives, still in the file, while that is open; None where it is not there in that form."""
        tensor = self.tensor(name)
        return self._parts[tensor.file].stored(tensor)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor decoded to float32, in its shape; UnsupportedFeatureError for a type without a decoder."""
        tensor = self.tensor(name)
        return dequantize(self.data(name), tensor.quant_type, tensor.shape)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where a file is no longer the one that was opened."""
        for part in self._parts.values():
            part.check_unchanged()

    def tensor(self, name: str) -> TensorInfo:
        """The description of a tensor; LookupError for no such tensor."""
        if name not in self.tensors:
            raise LookupError(f"{self.path.name} has no tensor {name!r}")
        return self.tensors[name]

    def quant_histogram(self) -> dict[str, tuple[int, int]]:
        """Quant type → (number of tensors, bytes), most bytes first."""
        totals: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors.values():
            count, num_bytes = totals.get(tensor.quant_type, (0, 0))
            totals[tensor.quant_type] = (count + 1, num_bytes + tensor.num_bytes)
        return dict(sorted(totals.items(), key=lambda item: (-item[1][1], item[0])))

    def sha256(self) -> str:
        """SHA-256 of the file; for a split checkpoint, of its files' hex digests in order, joined by newlines."""
        digests = [file_sha256(path) for path in self.files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Let the files go; what was read stays."""
        for part in self._parts.values():
            part.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read once a process as long as it does not change; CheckpointError when it cannot be read."""
    try:
        facts = path.stat()
        return _sha256(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}") from error


@cache
def _sha256(path: Path, num_bytes: int, mtime_ns: int) -> str:
    # size and time are asked for only to be part of the cache's key
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, the whole set that a shard (any of them) belongs to, or a Hugging Face directory.

    CheckpointError for what is neither or an incomplete set, GGUFError for a broken header; neither leaves a file open.
    """
    if is_directory(path):
        return Checkpoint(path, *open_directory(path))
    shards = shard_paths(path)
    _check_is_file(path)
    present = {entry.name for entry in path.parent.iterdir()} if len(shards) > 1 else {path.name}
    missing = [shard.name for shard in shards if shard.name not in present]
    if missing:
        raise CheckpointError(
            f"{path.name} is one of {len(shards)} shards, and {len(missing)} of them are missing beside it: "
            f"{listed(missing)}; fetch them into the same folder"
        )
    parts: list[Part] = []
    try:
        for index, shard in enumerate(shards):
            parts.append(open_gguf(shard))
            _check_split(parts[-1], index, len(shards))
        _check_tensor_count(parts)
        return Checkpoint(shards[0], parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the set that this name belongs to, in order; the path alone when its name has no shard pattern."""
    match = SHARD_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    index, count = int(match["index"]), int(match["count"])
    if not 1 <= index <= count:
        raise CheckpointError(f"{path.name}: shard {index} of {count} cannot exist; shards count from 00001")
    return tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))


def listed(names: list[str]) -> str:
    """Names for a sentence, the first few of many."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _check_is_file(path: Path) -> None:
    try:
        if path.is_dir():
            inside = sorted(entry.name for entry in path.glob("*.gguf"))
            advice = f"give one of its files: {listed(inside)}" if inside else "and there is no .gguf file in it"
            raise CheckpointError(f"{path} is a directory; {advice}")
        if not path.exists():
            raise CheckpointError(f"no such file: {path}")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
    except OSError as error:
        raise CheckpointError(f"cannot open {path.name[:60]}: {(error.strerror or str(error)).lower()}") from error


def _check_split(part: Part, index: int, count: int) -> None:
    """The split.* keys of a shard must say what its name says."""
    name, said_count, said_index = part.path.name, part.metadata.get("split.count"), part.metadata.get("split.no")
    if count == 1 and said_count in (None, 0, 1):
        return
    if SHARD_NAME.fullmatch(name) is None:
        raise CheckpointError(
            f"{name} says split.count={said_count!r:.20}, but its siblings cannot be found from this name: "
            "give all shards their names back, NAME-00001-of-0000N.gguf"
        )
    if said_count != count:
        raise CheckpointError(f"{name}: split.count is {said_count!r:.20}, but the name says {count} shards")
    if said_index != index:
        raise CheckpointError(f"{name}: split.no is {said_index!r:.20}, but by its name it must be {index}: renamed?")


def _check_tensor_count(parts: Sequence[Part]) -> None:
    said, found = parts[0].metadata.get("split.tensors.count"), sum(len(part.tensors) for part in parts)
    if len(parts) > 1 and said is not None and said != found:
        raise CheckpointError(
            f"{parts[0].path.name}: split.tensors.count is {said!r:.20}, "
            f"but the {len(parts)} shards hold {found} tensors"
        )


def _merged(parts: Sequence[Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise GGUFError(f"{part.path.name}: tensor {name!r} is in {tensors[name].file.name} already")
            tensors[name] = tensor
    return tensors
