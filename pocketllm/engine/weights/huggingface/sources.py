"""The tensors of a directory before they have GGUF's names: plain ones, and packed ones with their scales put in.

Conventions: FP8 multiplies by `weight_scale_inv` or `weight_scale` (of a tile, a row or the tensor); NVFP4's second,
global scale multiplies in modelopt (`weight_scale_2`) and divides in compressed-tensors (`weight_global_scale`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats
from pocketllm.engine.weights.huggingface import packing
from pocketllm.engine.weights.huggingface.quantization import Quantization
from pocketllm.engine.weights.huggingface.safetensors import PLAIN, SafetensorsFile, StoredTensor
from pocketllm.engine.weights.quant import dequantize
from pocketllm.errors import CheckpointError

UNUSED = ("input_scale", "activation_scale", "input_global_scale", "q_scale", "k_scale", "v_scale")
"""Scales of what is not stored: activations and caches, which have this engine's own types."""


@dataclass(frozen=True)
class Source:
    """One tensor. quant_type: of the bytes that `read` gives, in C order; file, start: where its weights lie."""

    name: str
    quant_type: str
    shape: tuple[int, ...]
    file: SafetensorsFile
    start: int
    read: Callable[[], Bytes]


@dataclass
class Stored:
    """Every tensor of the shards by name; `taken` are those that are part of another one."""

    files: Sequence[SafetensorsFile]
    by_name: dict[str, tuple[SafetensorsFile, StoredTensor]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for file in self.files:
            for name, tensor in file.tensors.items():
                if name in self.by_name:
                    other = self.by_name[name][0].path.name
                    raise CheckpointError(f"{file.path.name}: tensor {name!r:.80} is in {other} already")
                self.by_name[name] = file, tensor

    def dtype(self, name: str) -> str | None:
        """Element type of a tensor; None where there is no such."""
        return self.by_name[name][1].dtype if name in self.by_name else None

    def bytes(self, name: str) -> Bytes:
        """A tensor's bytes in its shape, an element's bytes side by side."""
        file, tensor = self.by_name[name]
        return file.data(name).reshape(*tensor.shape[:-1], -1) if tensor.shape else file.data(name)

    def floats(self, name: str) -> Floats:
        """Scales as float32, in their shape."""
        _, tensor = self.by_name[name]
        if tensor.dtype == "F8_E8M0":
            return packing.exponent_scales(self.bytes(name)).reshape(tensor.shape)
        return dequantize(self.bytes(name), tensor.dtype, tensor.shape)

    def source(self, name: str, quant_type: str, shape: tuple[int, ...], read: Callable[[], Bytes]) -> Source:
        """A tensor under the name and at the place of one that is stored."""
        file, tensor = self.by_name[name]
        return Source(name, quant_type, shape, file, tensor.start, read)

    def take(self, name: str, scale: str, *shapes: tuple[int, ...]) -> str:
        """Mark a scale as part of a tensor, once it has one of these shapes."""
        file, tensor = self.by_name[scale]
        if tensor.shape not in shapes:
            raise CheckpointError(
                f"{file.path.name}: tensor {scale!r:.80} has shape {list(tensor.shape)}, but the scales of "
                f"{name!r:.80} must have shape {' or '.join(str(list(shape)) for shape in shapes)}"
            )
        self.taken.add(scale)
        return scale


def read_sources(files: Sequence[SafetensorsFile], quantization: Quantization) -> dict[str, Source]:
    """Every tensor of the shards by its name there; CheckpointError for codes without scales that fit them."""
    stored = Stored(files)
    packed = {source.name: source for source in _packed(stored, quantization)}
    sources = {}
    for name, (file, tensor) in stored.by_name.items():
        if name in stored.taken or (packed and name.rpartition(".")[2] in UNUSED):
            continue
        if name not in packed and tensor.dtype not in PLAIN:
            raise CheckpointError(
                f"{file.path.name}: tensor {name!r:.80} has element type {tensor.dtype}, "
                "but there are no scales beside it that would make it a packed weight"
            )
        sources[name] = packed.get(name) or _plain(stored, name)
    for name in sources:
        plain = _plain_name(name)
        if plain != name and plain in sources:
            raise CheckpointError(f"tensors {plain!r:.80} and {name!r:.80} would both be the weight: keep one of them")
    return {_plain_name(name): source for name, source in sources.items()}


def _plain_name(name: str) -> str:
    return name.replace(".weight_packed", ".weight")


def _plain(stored: Stored, name: str) -> Source:
    _, tensor = stored.by_name[name]
    return stored.source(name, tensor.dtype, tensor.shape, lambda: stored.bytes(name))


def _packed(stored: Stored, quantization: Quantization) -> Iterator[Source]:
    """Tensors of codes that have scales beside them."""
    for name in stored.by_name:
        module, _, part = name.rpartition(".")
        scale = f"{module}.weight_scale"
        match part, stored.dtype(name):
            case "weight", "F8_E4M3":
                found = next((each for each in (f"{scale}_inv", scale) if each in stored.by_name), None)
                if found is not None:
                    yield _fp8(stored, name, found, quantization)
            case "weight", "U8" if stored.dtype(scale) == "F8_E4M3" and f"{scale}_2" in stored.by_name:
                yield _nvfp4(stored, name, scale, f"{scale}_2", divides=False)
            case "weight_packed", "U8" if stored.dtype(scale) == "F8_E4M3":
                shared = f"{module}.weight_global_scale"
                if shared in stored.by_name:
                    yield _nvfp4(stored, name, scale, shared, divides=True)
            case "weight_packed", "U8" if stored.dtype(scale) in ("U8", "F8_E8M0"):
                rows, width = _matrix(stored, name)
                yield _mxfp4(stored, name, scale, (rows, 2 * width))
            case _, "U8" if name.endswith("_blocks") and stored.dtype(f"{name[:-7]}_scales") == "U8":
                shape = stored.by_name[name][1].shape
                if len(shape) < 2 or shape[-1] != 16:
                    raise CheckpointError(f"tensor {name!r:.80} has shape {list(shape)}, but must end in 16 bytes")
                yield _mxfp4(stored, name, f"{name[:-7]}_scales", (*shape[:-2], 32 * shape[-2]))


def _matrix(stored: Stored, name: str) -> tuple[int, int]:
    """Its two sizes; CheckpointError for what is no matrix."""
    file, tensor = stored.by_name[name]
    if len(tensor.shape) != 2:
        raise CheckpointError(
            f"{file.path.name}: tensor {name!r:.80} has shape {list(tensor.shape)}, but packed weights are matrices"
        )
    return tensor.shape[0], tensor.shape[1]


def _fp8(stored: Stored, name: str, scale: str, quantization: Quantization) -> Source:
    rows, cols = _matrix(stored, name)
    whole, row = (rows, cols), (1, cols)
    tiles = {(rows,): row, (rows, 1): row, (): whole, (1,): whole, (1, 1): whole}
    if quantization.tile is not None:
        tiles[_grid(rows, cols, quantization.tile)] = quantization.tile
    stored.take(name, scale, *tiles)
    tile = tiles[stored.by_name[scale][1].shape]
    is_packed = cols % packing.BLOCK == 0 and (tile[1] >= cols or tile[1] % packing.BLOCK == 0)

    def read() -> Bytes:
        codes, scales = stored.bytes(name), stored.floats(scale).reshape(_grid(rows, cols, tile))
        if is_packed:
            return packing.fp8_blocks(codes, scales, tile)
        return packing.fp8_values(codes, scales, tile).view(np.uint8)

    return stored.source(name, "FP8" if is_packed else "F32", (rows, cols), read)


def _grid(rows: int, cols: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Tiles down and across, those cut off at the edges with them."""
    return -(-rows // tile[0]), -(-cols // tile[1])


def _nvfp4(stored: Stored, name: str, scale: str, shared: str, *, divides: bool) -> Source:
    rows, width = _matrix(stored, name)
    cols = 2 * width
    stored.take(name, scale, (rows, _groups(name, cols, packing.NVFP4_GROUP)))
    stored.take(name, shared, (), (1,), (1, 1))
    is_packed = cols % packing.BLOCK == 0

    def read() -> Bytes:
        factor = stored.floats(shared).reshape(-1)[0]
        if not np.isfinite(factor) or (divides and factor == 0):
            raise CheckpointError(f"tensor {shared!r:.80} is {factor}: it must be a finite number, and divide by none")
        codes, scales = stored.bytes(name), stored.bytes(scale)
        factor = np.float32(1) / factor if divides else factor
        if is_packed:
            return packing.nvfp4_blocks(codes, scales, factor)
        return packing.nvfp4_values(codes, scales, factor).view(np.uint8)

    return stored.source(name, "NVFP4_SCALED" if is_packed else "F32", (rows, cols), read)


def _mxfp4(stored: Stored, name: str, scale: str, shape: tuple[int, ...]) -> Source:
    stored.take(name, scale, (*shape[:-1], _groups(name, shape[-1], packing.MXFP4_GROUP)))

    def read() -> Bytes:
        exponents = stored.bytes(scale)
        if (exponents == packing.NO_NUMBER).any():
            raise CheckpointError(f"tensor {scale!r:.80} has a scale that is no number (E8M0 code 255): fetch it again")
        return packing.mxfp4_blocks(stored.bytes(name), exponents)

    return stored.source(name, "MXFP4", shape, read)


def _groups(name: str, cols: int, group: int) -> int:
    """Groups of a row; CheckpointError where they are not whole."""
    if cols % group:
        raise CheckpointError(f"tensor {name!r:.80} has rows of {cols} values, which are no whole groups of {group}")
    return cols // group
