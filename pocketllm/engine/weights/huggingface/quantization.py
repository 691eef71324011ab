"""What a directory's `quantization_config` says about its packed weights; what cannot be read is refused by name.

Which matrices are packed is told by their tensors, so that a module that was left out (`modules_to_not_convert`,
`ignore`) is read as the plain matrix that it is. How activations and caches would be rounded is not followed: they have
this engine's own types.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.weights.huggingface.rules import sequence
from pocketllm.errors import UnsupportedFeatureError

METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Those of compressed-tensors that are read."""
ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
"""Those of modelopt."""


@dataclass(frozen=True)
class Quantization:
    """What the tensors do not say themselves. tile: rows and columns of an FP8 matrix that share a scale, if any do."""

    method: str | None = None
    tile: tuple[int, int] | None = None


def read_quantization(said: Any) -> Quantization:
    """From a `quantization_config`, None where there is none. UnsupportedFeatureError for what is not read."""
    if said is None:
        return Quantization()
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in METHODS:
        raise refused(f"quant_method {method!r:.60}", f"read are {', '.join(METHODS)}")
    if method == "fp8":
        return Quantization(method, _of_fp8(said))
    if method == "compressed-tensors":
        return Quantization(method, _of_compressed_tensors(said))
    if method == "modelopt":
        _check_modelopt(said)
    return Quantization(method)


def refused(what: str, advice: str) -> UnsupportedFeatureError:
    """A sentence on the config, and what to do."""
    reason = f"config.json's quantization_config has {what}, which is not read ({advice}): convert the model to GGUF"
    return UnsupportedFeatureError("Hugging Face directory", [reason])


def _of_fp8(said: Mapping[str, Any]) -> tuple[int, int] | None:
    if said.get("fmt", "e4m3") != "e4m3":
        raise refused(f"fmt {said['fmt']!r:.40}", "read is e4m3")
    if said.get("expert_dtype", "fp8") != "fp8":
        raise refused(f"expert_dtype {said['expert_dtype']!r:.40}", "read is fp8")
    return _tile("weight_block_size", said.get("weight_block_size"))


def _of_compressed_tensors(said: Mapping[str, Any]) -> tuple[int, int] | None:
    """The one tile of all groups."""
    for name in ("sparsity_config", "transform_config"):
        part = said.get(name) or {}
        if isinstance(part, Mapping) and part.get("format", "dense") == "dense" and not part.get("config_groups"):
            continue
        raise refused(name, "read are dense weights that are not transformed")
    tiles = set()
    for stored_as, weights in _groups(said):
        if stored_as not in FORMATS:
            raise refused(f"format {stored_as!r:.60}", f"read are {', '.join(FORMATS)}")
        if weights.get("type") != "float" or weights.get("symmetric", True) is not True:
            raise refused(f"weights of type {weights.get('type')!r:.40}", "read are symmetric floats")
        if weights.get("strategy") == "group" and weights.get("num_bits") == 8:
            raise refused("8-bit weights by group", "read are scales of a tensor, a channel or a block")
        if weights.get("block_structure") is not None:
            tiles.add(_tile("block_structure", weights["block_structure"]))
    if len(tiles) > 1:
        raise refused("groups with blocks of several sizes", "read is one size")
    return tiles.pop() if tiles else None


def _groups(said: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Format and weights of each group."""
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping):
            raise refused(f"a group {group!r:.60}", "read are groups that say their weights")
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            yield group.get("format") or said.get("format"), weights


def _check_modelopt(said: Mapping[str, Any]) -> None:
    inner = said.get("quantization")
    algorithm = said.get("quant_algo", inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    if algorithm not in ALGORITHMS:
        raise refused(f"quant_algo {algorithm!r:.60}", f"read are {', '.join(ALGORITHMS)}")


def _tile(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = sequence(list(value) if isinstance(value, tuple) else value)
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise refused(f"{name} {value!r:.60}", "it must be two whole numbers above 0")
    return sizes[0], sizes[1]
