"""Opens a Hugging Face directory: every shard as a part of a checkpoint, its tensors under their GGUF names."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.gguf import Metadata, TensorInfo
from pocketllm.engine.weights.huggingface import names
from pocketllm.engine.weights.huggingface.metadata import MadeMetadata
from pocketllm.engine.weights.huggingface.moving import moved, shape_of, type_of
from pocketllm.engine.weights.huggingface.quantization import read_quantization
from pocketllm.engine.weights.huggingface.rules import Config, Mapped, Rule
from pocketllm.engine.weights.huggingface.safetensors import SafetensorsFile, open_safetensors
from pocketllm.engine.weights.huggingface.sources import Source, read_sources
from pocketllm.engine.weights.huggingface.tokenizer_json import read_tokenizer
from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import CheckpointError, UnsupportedFeatureError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELOPT = "hf_quant_config.json"
"""Where older files of modelopt say how they are quantized."""
GENERATION = "generation_config.json"
BESIDE = ("config.json", GENERATION, "tokenizer.json", "tokenizer_config.json", MODELOPT)
"""Files that say what the tensors are."""


Pieces = Sequence[tuple[Source, Rule]]
"""What a GGUF tensor is made of: one tensor of the directory, or one for each expert."""


@dataclass
class DirectoryPart:
    """One shard as GGUF would have it; see `checkpoint.Part`. `made`: tensors computed from config.json."""

    file: SafetensorsFile
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    pieces: Mapping[str, Pieces]
    made: Mapping[str, npt.NDArray[np.float32]]
    version: int = 0
    alignment: int = 1

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    def data(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor, as they are in the file where nothing is done to it."""
        if tensor.name in self.made:
            return self.made[tensor.name].reshape(-1).view(np.uint8)
        [first, *others] = self.pieces[tensor.name]
        if not others:
            return moved(*first, tensor.quant_type)
        data = np.empty((1 + len(others), tensor.num_bytes // (1 + len(others))), np.uint8)
        for row, (source, rule) in zip(data, (first, *others), strict=True):
            row[:] = moved(source, rule, tensor.quant_type)
        return data.reshape(-1)

    def stored(self, tensor: TensorInfo) -> None:
        """Nothing: rows may be in another order, or of another type, than in the file."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is no longer the one that was opened."""
        self.file.check_unchanged()

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self.file.close()


def is_directory(path: Path) -> bool:
    """Whether this is a Hugging Face directory rather than a folder of files."""
    try:
        return (path / "config.json").is_file()
    except OSError:  # a name that no file could have: told by who opens it as a file
        return False


def open_directory(path: Path) -> tuple[list[DirectoryPart], tuple[Path, ...]]:
    """Its shards in order, and the files beside them that say what they are.

    CheckpointError for a damaged or incomplete directory, UnsupportedFeatureError for what no file in `names` reads.
    """
    with _named(path):
        return _opened(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which directory it is that an error tells of."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except UnsupportedFeatureError as error:
        raise UnsupportedFeatureError(f"{path}: {error.subject}", error.reasons) from error


def _opened(path: Path) -> tuple[list[DirectoryPart], tuple[Path, ...]]:
    values = read_json(path / "config.json")
    module, mapped = _mapped(Config.of_text(values), values.get("model_type"))
    quantization = read_quantization(_said_of_quantization(path, values))
    config = {**Config.of_text(values).values, "eos_token_id": _ends(path, Config.of_text(values))}
    metadata = {
        "general.architecture": module.ARCHITECTURE,
        "general.name": path.resolve().name,
        **mapped.metadata,
        **read_tokenizer(path, config, read_json),
    }
    is_tied = {**defaults_of(module), **config}.get("tie_word_embeddings", False)
    opened: list[SafetensorsFile] = []
    try:
        opened.extend(open_safetensors(shard) for shard in shard_paths(path))
        _check_index(path, opened)
        pieces = _pieces(read_sources(opened, quantization), mapped, is_tied)
        return _parts(opened, MadeMetadata(metadata), mapped.made, pieces), _beside(path)
    except BaseException:
        for file in opened:
            file.close()
        raise


def _ends(path: Path, config: Config) -> list[int]:
    """Tokens that end an answer: config.json's, then those that only generation_config.json names."""
    said = {"config.json": config.values.get("eos_token_id")}
    if (path / GENERATION).is_file():
        said[GENERATION] = read_json(path / GENERATION).get("eos_token_id")
    ends: dict[int, None] = {}
    for file, value in said.items():
        for end in value if isinstance(value, list) else [] if value is None else [value]:
            if type(end) is not int:  # JSON's true is an int too
                raise CheckpointError(
                    f"{file}: eos_token_id is {value!r:.60}, but must be a token id or a list of them"
                )
            ends[end] = None
    return list(ends)


def _beside(path: Path) -> tuple[Path, ...]:
    return tuple(path / name for name in BESIDE if (path / name).is_file())


def _said_of_quantization(path: Path, values: Mapping[str, Any]) -> Any:
    """config.json's word on it, or modelopt's in a file of its own."""
    said = values.get("quantization_config")
    if said is None and (path / MODELOPT).is_file():
        return {"quant_method": "modelopt", **read_json(path / MODELOPT)}
    return said


def _pieces(sources: Mapping[str, Source], mapped: Mapped, is_tied: bool) -> dict[str, list[tuple[Source, Rule]]]:
    """What each GGUF tensor is made of; tensors that no text model has, and a head that is tied, are left out."""
    pieces: dict[str, list[tuple[Source, Rule]]] = {}
    for stored_as, source in sources.items():
        name = text_name(stored_as)
        is_left_out = name.endswith("rotary_emb.inv_freq") or (is_tied and name.startswith("lm_head."))
        if not is_left_out and not name.startswith(mapped.ignored):
            for rule in mapped.rules_of(name):
                pieces.setdefault(rule.name, []).append((source, rule))
    for name, made_of in pieces.items():
        made_of.sort(key=lambda piece: piece[1].part or 0)
        if len({rule.part for _, rule in made_of}) < len(made_of):
            both = " and ".join(repr(source.name) for source, _ in made_of[:2])
            raise CheckpointError(f"tensors {both:.160} would both be {name}")
    return pieces


def _parts(
    files: Sequence[SafetensorsFile],
    metadata: Metadata,
    made: Mapping[str, npt.NDArray[np.float32]],
    pieces: Mapping[str, Pieces],
) -> list[DirectoryPart]:
    """A part for each shard: tensors are in that of their first piece, computed ones in the first."""
    tensors: dict[Path, dict[str, TensorInfo]] = {file.path: {} for file in files}
    for name, made_of in pieces.items():
        tensors[made_of[0][0].file.path][name] = _described(name, made_of)
    for name, values in made.items():
        tensors[files[0].path][name] = _info(name, values.shape, "F32", 0, files[0].path)
    return [DirectoryPart(file, metadata, tensors[file.path], pieces, made) for file in files]


def _described(name: str, pieces: Pieces) -> TensorInfo:
    """Types that differ between experts become float32; shapes may not differ."""
    source, rule = pieces[0]
    types, shapes = {type_of(*piece) for piece in pieces}, {shape_of(*piece) for piece in pieces}
    if len(shapes) > 1:
        raise CheckpointError(f"{source.file.path.name}: the tensors of {name} have several shapes: {sorted(shapes)}")
    shape = shapes.pop() if rule.part is None else (len(pieces), *shapes.pop())
    return _info(name, shape, types.pop() if len(types) == 1 else "F32", source.start, source.file.path)


def _info(name: str, shape: tuple[int, ...], quant_type: str, start: int, file: Path) -> TensorInfo:
    kind = BY_NAME[quant_type]
    num_bytes = prod(shape) // kind.block_elements * kind.block_bytes
    return TensorInfo(name, shape, quant_type, kind.type_id, start, num_bytes, file)


def text_name(name: str) -> str:
    """A tensor's name as a model of text alone has it."""
    for prefix, plain in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def shard_paths(path: Path) -> list[Path]:
    """The shards that the index names, or the one file; CheckpointError names what is missing."""
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"it has a config.json, but neither {SINGLE} nor {INDEX}: fetch the weights")
        return [path / SINGLE]
    shards = sorted(set(_weight_map(path).values()))
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{INDEX} names {len(shards)} shards, and {missing[0]}{more} is missing: fetch it too")
    return [path / name for name in shards]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the directory; CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON: fetch or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is no JSON object: fetch or copy it again")
    return value


@cache
def known() -> Mapping[str, str]:
    """Files of `names` by the `model_type` they read."""
    stems = sorted(path.stem for path in Path(names.__path__[0]).glob("[a-z]*.py"))
    return {kind: stem for stem in stems for kind in import_module(f"{names.__name__}.{stem}").MODEL_TYPES}


def _mapped(config: Config, kind: Any) -> tuple[Any, Mapped]:
    """The file of `names` that reads this `model_type`, and what it makes of the config."""
    if not isinstance(kind, str) or kind not in known():
        reason = f"config.json has model_type {kind!r:.60}; safetensors are read for {', '.join(known())}"
        raise UnsupportedFeatureError("Hugging Face directory", [reason])
    module = import_module(f"{names.__name__}.{known()[kind]}")
    return module, module.read(Config({**defaults_of(module), **config.values}))


def defaults_of(module: Any) -> Mapping[str, Any]:
    """What transformers takes for a key that a config.json leaves out, as it does in published ones."""
    defaults: Mapping[str, Any] = getattr(module, "DEFAULTS", {})
    return defaults


def _weight_map(path: Path) -> Mapping[str, str]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map: fetch or copy it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{INDEX} names a shard {shard!r:.60}, which is no file name of this directory")
    return weight_map


def _check_index(path: Path, opened: list[SafetensorsFile]) -> None:
    if not (path / INDEX).is_file():
        return
    found = {file.path.name: file for file in opened}
    for name, shard in _weight_map(path).items():
        if name not in found[shard].tensors:
            raise CheckpointError(f"{INDEX} says that tensor {name!r:.80} is in {shard}, but it is not: fetch it again")
