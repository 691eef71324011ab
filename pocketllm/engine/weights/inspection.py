"""What a checkpoint is, from its header alone: the report behind `pocketllm inspect`.

Works for every architecture and every tensor type, known or not; reads no tensor data and imports no torch.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from pocketllm.engine.weights import quant
from pocketllm.engine.weights.catalog import model_name
from pocketllm.engine.weights.checkpoint import Checkpoint
from pocketllm.engine.weights.gguf import TensorInfo
from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import GGUFError

ARRAY_HEAD = 6
"""Elements of a metadata array that the report shows."""
LONGEST_TEXT = 20_000
"""Characters of a metadata text that the report carries; a longer one is cut and says so."""
KV_ELEMENT_BYTES: Mapping[str, int] = {"float16": 2, "float32": 4}


class CacheShape(Protocol):
    """The part of a family's KVSpec that sizes a cache."""

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token adds to the cache."""

    def bytes_per_sequence(self) -> int:
        """Bytes that one sequence takes beside, however long it is."""

    def window_tokens(self) -> int:
        """How many of the latest tokens layers that see a window look at; 0 without such layers."""

    def bytes_in_window(self, element_bytes: int) -> int:
        """Bytes that one token takes in all of those, while they keep it."""


class Family(Protocol):
    """The part of a model family that an inspection asks; `models.contract.ModelFamily` is the real one."""

    @property
    def architecture(self) -> str:
        """GGUF architecture name."""

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheShape:
        """Cache shape, from the header alone."""

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        """Longest context, in tokens."""

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Every reason why this checkpoint cannot run in this family."""


def inspect_checkpoint(
    checkpoint: Checkpoint, family: Family | str, problems: Sequence[str] = (), unread: Collection[str] = ()
) -> dict[str, Any]:
    """The whole report, JSON-able; sizes in bytes.

    family: the architecture's family, or the sentence that says why there is none. problems: what else is missing to
    run it (the tokenizer's reasons). unread: tensors of layers that are never loaded. `errors` holds what is damaged in
    the header, `missing` what this tool lacks.
    """
    metadata, errors = describe_metadata(checkpoint)
    parameters = sum(tensor.num_elements for tensor in checkpoint.tensors.values())
    tensor_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    loaded = [tensor for name, tensor in checkpoint.tensors.items() if name not in unread]
    missing = [*family_reasons(checkpoint, family), *type_reasons(checkpoint, unread), *problems]
    return {
        "name": model_name(checkpoint.path),
        "title": metadata.get("general.name"),
        "architecture": checkpoint.metadata.get("general.architecture"),
        "family": None if isinstance(family, str) else family.architecture,
        "runs": not missing and not errors,
        "missing": missing,
        "errors": errors,
        "gguf_version": checkpoint.version,
        "alignment": checkpoint.alignment,
        "num_bytes": checkpoint.num_bytes,
        "num_tensors": len(checkpoint.tensors),
        "num_parameters": parameters,
        "bits_per_weight": round(8 * tensor_bytes / parameters, 3) if parameters else None,
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in checkpoint.files],
        "quant_types": describe_types(checkpoint),
        "not_loaded": {
            "layers": sorted({int(name.split(".")[1]) for name in unread}),
            "tensors": len(unread),
            "bytes": tensor_bytes - sum(tensor.num_bytes for tensor in loaded),
        },
        "memory": memory_plan(checkpoint, family, loaded),
        "tokenizer": describe_tokenizer(checkpoint),
        "metadata": metadata,
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "quant_type": t.quant_type, "bytes": t.num_bytes}
            for t in checkpoint.tensors.values()
        ],
    }


# -- what is missing --------------------------------------------------------------------------------------------------
def family_reasons(checkpoint: Checkpoint, family: Family | str) -> list[str]:
    """Why no family runs it, or what its family cannot do; a header that its family cannot read is a reason too."""
    if isinstance(family, str):
        return [family]
    try:
        return list(family.unmet(checkpoint))
    except GGUFError as error:
        return [str(error)]


def type_reasons(checkpoint: Checkpoint, unread: Collection[str]) -> list[str]:
    """One reason for each tensor type without a decoder, with its number of tensors and one of their names."""
    reasons = []
    for quant_type in checkpoint.quant_histogram():
        of_type = [t for t in checkpoint.tensors.values() if t.quant_type == quant_type and t.name not in unread]
        if quant_type not in quant.known_types() and of_type:
            example = of_type[0]
            reasons.append(
                f"{quant.why_not(quant_type)} ({len(of_type)} tensors, such as {example.name}: id {example.type_id})"
            )
    return reasons


# -- parts ------------------------------------------------------------------------------------------------------------
def describe_types(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The quant histogram, most bytes first; bits per weight is None where a type's block size is not known."""
    rows = []
    for quant_type, (count, num_bytes) in checkpoint.quant_histogram().items():
        weights = sum(t.num_elements for t in checkpoint.tensors.values() if t.quant_type == quant_type)
        is_known = quant_type in BY_NAME
        rows.append(
            {
                "type": quant_type,
                "tensors": count,
                "parameters": weights,
                "bytes": num_bytes,
                "bits_per_weight": round(8 * num_bytes / weights, 3) if is_known else None,
                "decodable": quant_type in quant.known_types(),
            }
        )
    return rows


def describe_tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """Kind, pre-tokenizer, vocabulary size and whether there is a chat template; None where the header has nothing."""
    metadata = checkpoint.metadata
    tokens = metadata.array("tokenizer.ggml.tokens") if "tokenizer.ggml.tokens" in metadata else None
    return {
        "model": readable(checkpoint, "tokenizer.ggml.model"),
        "pre": readable(checkpoint, "tokenizer.ggml.pre"),
        "num_tokens": tokens.count if tokens else None,
        "has_chat_template": "tokenizer.chat_template" in metadata,
    }


def readable(checkpoint: Checkpoint, key: str) -> Any:
    """A metadata value; None when it is absent or damaged (the report's errors tell of that)."""
    try:
        return checkpoint.metadata.get(key)
    except GGUFError:
        return None


def describe_metadata(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Metadata with long values shortened, and one error for each value that cannot be read."""
    shown: dict[str, Any] = {}
    errors: list[str] = []
    for key in checkpoint.metadata:
        try:
            shown[key] = describe_value(checkpoint, key)
        except GGUFError as error:
            errors.append(str(error))
    return shown, errors


def describe_value(checkpoint: Checkpoint, key: str) -> Any:
    """A value as the report has it: arrays as type, count and first elements; never NaN or infinity as a number."""
    array = checkpoint.metadata.array(key)
    if array is not None:
        first = [finite(value) for value in checkpoint.metadata.head(key, ARRAY_HEAD)]
        return {"array": array.element_type, "count": array.count, "first": first}
    value = checkpoint.metadata[key]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:LONGEST_TEXT]}… (cut: {len(value)} characters)"
    return finite(value)


def finite(value: Any) -> Any:
    """A value that JSON can carry: a NaN or an infinity becomes its name, a text or nested array is shortened."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [finite(item) for item in value[:ARRAY_HEAD]]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + "…"
    return value


# -- memory -----------------------------------------------------------------------------------------------------------
def memory_plan(checkpoint: Checkpoint, family: Family | str, loaded: Sequence[TensorInfo]) -> dict[str, Any]:
    """Bytes of the weights and of the cache, per token and for the whole context, by the cache's element type; of a
    request's recurrent states; and of a token in layers that see a window, which keep their latest tokens alone.

    loaded: tensors that are. From the family when there is one that reads the header, else an estimate for plain
    attention; None: not known.
    """
    plan: dict[str, Any] = {
        "weights_bytes": sum(tensor.num_bytes for tensor in loaded),
        "weights_float32_bytes": 4 * sum(tensor.num_elements for tensor in loaded),
        "source": None,
        "context_length": None,
        "kv_bytes_per_token": None,
        "kv_bytes_context": None,
        "state_bytes_per_request": None,
        "window_tokens": None,
        "window_bytes_per_token": None,
    }
    architecture = readable(checkpoint, "general.architecture")
    try:
        if isinstance(family, str):
            per_element = plain_cache_elements(checkpoint, f"{architecture}.")
            context = header_number(checkpoint, f"{architecture}.context_length")
            source = "estimate for plain attention, from the header"
        else:
            spec = family.kv_spec(checkpoint.metadata)
            per_element = spec.bytes_per_token(1)
            plan["state_bytes_per_request"] = spec.bytes_per_sequence()
            if window := spec.window_tokens():
                in_window = spec.bytes_in_window(1)
                plan["window_tokens"] = window
                plan["window_bytes_per_token"] = {kind: in_window * size for kind, size in KV_ELEMENT_BYTES.items()}
            context, source = family.context_length(checkpoint.metadata), f"family {family.architecture}"
    except GGUFError:
        return plan
    plan["context_length"] = context
    if per_element:
        per_token = {kind: per_element * size for kind, size in KV_ELEMENT_BYTES.items()}
        plan["source"], plan["kv_bytes_per_token"] = source, per_token
        if context:
            plan["kv_bytes_context"] = {kind: size * context for kind, size in per_token.items()}
    return plan


def plain_cache_elements(checkpoint: Checkpoint, prefix: str) -> int | None:
    """Keys and values that one token keeps over all layers, if every layer were plain attention; None: keys missing."""
    layers = header_number(checkpoint, prefix + "block_count")
    heads = header_number(checkpoint, prefix + "attention.head_count")
    hidden = header_number(checkpoint, prefix + "embedding_length")
    if not layers or layers > len(checkpoint.tensors):
        return None
    counts = readable(checkpoint, prefix + "attention.head_count_kv")
    if isinstance(counts, list):
        if len(counts) < layers or not all(isinstance(count, int) and count >= 0 for count in counts):
            return None
        kv_heads = sum(counts[:layers])
    else:
        kv_heads = layers * (header_number(checkpoint, prefix + "attention.head_count_kv") or heads or 0)
    head_dim = hidden // heads if hidden and heads else 0
    key_dim = header_number(checkpoint, prefix + "attention.key_length") or head_dim
    value_dim = header_number(checkpoint, prefix + "attention.value_length") or head_dim
    return kv_heads * (key_dim + value_dim) or None


def header_number(checkpoint: Checkpoint, key: str) -> int | None:
    """A positive whole number of the header; None for anything else."""
    value = readable(checkpoint, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
