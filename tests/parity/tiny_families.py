"""Tiny random checkpoints of any plain family, written as GGUF: the tensors that the family asks for, in float32."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pocketllm.engine.models.blocks import read_dense_shape
from pocketllm.engine.models.header import HeaderReader
from tests.tiny import add_value, vocabulary

BASE: Mapping[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
OWN_BASE: Mapping[str, Mapping[str, Any]] = {
    "qwen3moe": {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32},
}
"""Keys that a family needs on top."""


@dataclass(frozen=True)
class TinyFamily:
    """One checkpoint to be made. keys: over BASE, without the architecture's name; None leaves one out."""

    architecture: str
    seed: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    tensors: Mapping[str, npt.NDArray[np.float32] | None] = field(default_factory=dict)
    """More tensors by name; None leaves one out."""
    spoiled: Mapping[str, Any] = field(default_factory=dict)
    """Keys as in `keys` that the file says and its tensors do not follow."""

    def metadata(self) -> dict[str, Any]:
        """Every key, the tokenizer's too."""
        own = {
            f"{self.architecture}.{name}": value
            for name, value in {**BASE, **OWN_BASE.get(self.architecture, {}), **self.keys}.items()
        }
        return {name: value for name, value in {**own, **vocabulary()}.items() if value is not None}


def write_family(path: Path, spec: TinyFamily) -> Path:
    """Write a checkpoint; milliseconds."""
    writer = gguf.GGUFWriter(path, spec.architecture)
    spoiled = {f"{spec.architecture}.{name}": value for name, value in spec.spoiled.items()}
    for key, value in {**spec.metadata(), **spoiled}.items():
        add_value(writer, key, value)
    for name, values in {**weights(spec), **spec.tensors}.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights(spec: TinyFamily) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors by name from numpy's frozen legacy generator; norms around 1, the rest around 0."""
    family = import_module(f"pocketllm.engine.models.families.{spec.architecture}")
    read = getattr(family, "read_shape", read_dense_shape)  # what the plainest families use
    needed, optional = family.tensor_shapes(read(HeaderReader(spec.metadata(), spec.architecture), vocab_size=512))
    shapes = needed if spec.tied else needed | {"output.weight": optional["output.weight"]}
    random = np.random.RandomState(spec.seed)
    tensors = {}
    for name in sorted(shapes):
        scale = 0.1 if len(shapes[name]) == 1 else 0.15
        values = random.standard_normal(shapes[name]) * scale + (1 if "norm" in name else 0)
        tensors[name] = values.astype(np.float32)
    return tensors
