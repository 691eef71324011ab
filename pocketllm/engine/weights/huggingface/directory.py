"""Opens a Hugging Face directory: every shard as a part of a checkpoint, its tensors under their GGUF names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from pocketllm.engine.weights.huggingface.rules import Config, Mapped, Rule
from pocketllm.engine.weights.huggingface.safetensors import SafetensorsFile, StoredTensor, open_safetensors
from pocketllm.engine.weights.huggingface.tokenizer_json import read_tokenizer
from pocketllm.engine.weights.quant import dequantize
from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import CheckpointError, UnsupportedFeatureError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class DirectoryPart:
    """One shard as GGUF would have it; see `checkpoint.Part`. `made`: tensors computed from config.json."""

    file: SafetensorsFile
    metadata: Metadata
    rules: Mapping[str, Rule]
    made: Mapping[str, npt.NDArray[np.float32]]
    version: int = 0
    alignment: int = 1
    tensors: dict[str, TensorInfo] = field(init=False)

    def __post_init__(self) -> None:
        self._stored = {rule_of(self.rules, name).name: name for name in self.file.tensors}
        self.tensors = {}
        for name, original in self._stored.items():
            tensor, rule = self.file.tensors[original], rule_of(self.rules, original)
            shape = rule.shape if rule.shape and prod(rule.shape) == prod(tensor.shape) else tensor.shape
            self.tensors[name] = self._info(name, shape, result_type(tensor, rule))
        for name, values in self.made.items():
            self.tensors[name] = self._info(name, values.shape, "F32")

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
        original = self._stored[tensor.name]
        stored, rule = self.file.tensors[original], rule_of(self.rules, original)
        data = self.file.data(original)
        if rule.rows is not None or rule.columns is not None:
            _check_order(self.path.name, stored, rule)
            data = reordered(data, stored, rule)
        if stored.dtype != tensor.quant_type or rule.compute is not None:
            values = dequantize(data, stored.dtype, stored.shape)
            data = (values if rule.compute is None else rule.compute(values)).reshape(-1).view(np.uint8)
        return data

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is no longer the one that was opened."""
        self.file.check_unchanged()

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self.file.close()

    def _info(self, name: str, shape: tuple[int, ...], quant_type: str) -> TensorInfo:
        kind = BY_NAME[quant_type]
        original = self._stored.get(name)
        start = self.file.tensors[original].start if original is not None else 0
        return TensorInfo(name, shape, quant_type, kind.type_id, start, prod(shape) * kind.block_bytes, self.path)


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
    values = read_json(path / "config.json")
    architecture, mapped = _mapped(Config(values))
    beside = [
        path / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json") if (path / name).is_file()
    ]
    metadata = {
        "general.architecture": architecture,
        "general.name": path.resolve().name,
        **mapped.metadata,
        **read_tokenizer(path, values, read_json),
    }
    skipped = {"lm_head.weight"} if values.get("tie_word_embeddings", architecture == "gemma3") else set()
    opened: list[SafetensorsFile] = []
    try:
        for shard in shard_paths(path):
            file = open_safetensors(shard)
            opened.append(file)
            file.tensors = {
                name: tensor
                for name, tensor in file.tensors.items()
                if name not in skipped and not name.endswith("rotary_emb.inv_freq")
            }
        _check_index(path, opened)
        made = MadeMetadata(metadata)
        parts = [
            DirectoryPart(file, made, mapped.rules, {} if number else mapped.made) for number, file in enumerate(opened)
        ]
        return parts, tuple(beside)
    except BaseException:
        for file in opened:
            file.close()
        raise


def shard_paths(path: Path) -> list[Path]:
    """The shards that the index names, or the one file; CheckpointError names what is missing."""
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path.name} has a config.json, but neither {SINGLE} nor {INDEX}: fetch the weights")
        return [path / SINGLE]
    shards = sorted(set(_weight_map(path).values()))
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path.name}: {INDEX} names {len(shards)} shards, and {missing[0]}{more} is missing: fetch it too"
        )
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


def rule_of(rules: Mapping[str, Rule], name: str) -> Rule:
    """The rule of a tensor; one that no rule knows keeps its name, for the family to refuse it by."""
    return rules.get(name) or Rule(name)


def result_type(tensor: StoredTensor, rule: Rule) -> str:
    """Vectors and what is computed are float32."""
    return "F32" if rule.compute is not None or len(rule.shape or tensor.shape) < 2 else tensor.dtype


def reordered(data: npt.NDArray[np.uint8], tensor: StoredTensor, rule: Rule) -> npt.NDArray[np.uint8]:
    """The bytes with rows and columns in the order of the rule."""
    element = f"<u{tensor.num_bytes // prod(tensor.shape)}"
    table = data.view(element).reshape(tensor.shape[0], -1)
    if rule.rows is not None:
        table = table[rule.rows]
    if rule.columns is not None:
        table = table[:, rule.columns]
    return np.ascontiguousarray(table).reshape(-1).view(np.uint8)


@cache
def known() -> Mapping[str, str]:
    """Files of `names` by the `model_type` they read."""
    stems = sorted(path.stem for path in Path(names.__path__[0]).glob("[a-z]*.py"))
    return {kind: stem for stem in stems for kind in import_module(f"{names.__name__}.{stem}").MODEL_TYPES}


def _mapped(config: Config) -> tuple[str, Mapped]:
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in known():
        reason = f"config.json has model_type {kind!r:.60}; safetensors are read for {', '.join(known())}"
        raise UnsupportedFeatureError("Hugging Face directory", [reason])
    if config.values.get("quantization_config") is not None:
        reason = "config.json has a quantization_config; safetensors are read in F32, F16 and BF16 only"
        raise UnsupportedFeatureError("Hugging Face directory", [reason])
    module = import_module(f"{names.__name__}.{known()[kind]}")
    return module.ARCHITECTURE, module.read(config)


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
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq") and name not in found[shard].tensors:
            raise CheckpointError(f"{INDEX} says that tensor {name!r:.80} is in {shard}, but it is not: fetch it again")


def _check_order(file: str, tensor: StoredTensor, rule: Rule) -> None:
    for axis, order in ((0, rule.rows), (1, rule.columns)):
        if order is not None and (len(tensor.shape) <= axis or tensor.shape[axis] != len(order)):
            raise CheckpointError(
                f"{file}: tensor {tensor.name!r:.80} has shape {list(tensor.shape)}, "
                f"but config.json makes its axis {axis} {len(order)} long"
            )
