"""Make tiny random llama checkpoints of any shape, and compute their logits a second, plain way.

The weights come from numpy's frozen legacy generator: the same spec gives the same file on every machine, so that
committed logits of an outside implementation stay valid. Nothing here uses the engine: files are written and read with
the `gguf` package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

VOCABULARY = Path(__file__).parent / "oracles" / "llama.gguf"
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class TinyLlama:
    """One checkpoint to be made. `metadata` and `tensors` override what would be written; None leaves it out."""

    seed: int = 0
    hidden: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_dim: int | None = None
    intermediate: int = 96
    context: int = 512
    theta: float = 10000.0
    eps: float = 1e-6
    tied: bool = False
    biases: bool = False
    quant_type: str = "F32"
    llama3: bool = False
    """Write the divisors of llama 3.1: factor 8, low 1, high 4, original context 64."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """`llama.rope.scaling.*` keys, such as {"type": "yarn", "factor": 4.0}."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """More keys, by full name."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """More tensors, by name."""


@cache
def vocabulary() -> Mapping[str, Any]:
    """Tokenizer keys of the committed oracle: 512 tokens of byte-level BPE."""
    fields = gguf.GGUFReader(VOCABULARY).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def write_llama(path: Path, spec: TinyLlama | None = None) -> Path:
    """Write a checkpoint; milliseconds. Norm weights, biases and divisors stay float32 whatever the quant type."""
    spec = spec or TinyLlama()
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {**header(spec), **vocabulary(), **spec.metadata}
    for key, value in metadata.items():
        if value is not None:
            add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[spec.quant_type]
    for name, values in {**weights(spec), **spec.tensors}.items():
        if values is None:
            continue
        if spec.quant_type == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(spec: TinyLlama) -> dict[str, Any]:
    """`general.*` and `llama.*` keys."""
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": spec.num_layers,
        "llama.context_length": spec.context,
        "llama.embedding_length": spec.hidden,
        "llama.feed_forward_length": spec.intermediate,
        "llama.vocab_size": 512,
        "llama.attention.head_count": spec.num_heads,
        "llama.attention.head_count_kv": spec.num_kv_heads,
        "llama.attention.key_length": spec.head_dim,
        "llama.attention.value_length": spec.head_dim,
        "llama.attention.layer_norm_rms_epsilon": spec.eps,
        "llama.rope.freq_base": spec.theta,
        "llama.rope.dimension_count": spec.rope_dim or spec.head_dim,
    }
    return keys | {f"llama.rope.scaling.{name}": value for name, value in spec.scaling.items()}


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write one key in the type that GGUF uses for it: whole numbers as uint32, fractions as float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def weights(spec: TinyLlama) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors by GGUF name, row-major."""
    random = np.random.RandomState(spec.seed)

    def normal(*shape: int, scale: float) -> npt.NDArray[np.float32]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "attn_q": (query, spec.hidden),
        "attn_k": (key, spec.hidden),
        "attn_v": (key, spec.hidden),
        "attn_output": (spec.hidden, query),
        "ffn_gate": (spec.intermediate, spec.hidden),
        "ffn_up": (spec.intermediate, spec.hidden),
        "ffn_down": (spec.hidden, spec.intermediate),
    }
    tensors = {"token_embd.weight": normal(512, spec.hidden, scale=0.15)}
    for layer in range(spec.num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = 1 + normal(spec.hidden, scale=0.1)
        for name in MATRICES:
            tensors[f"blk.{layer}.{name}.weight"] = normal(*shapes[name], scale=0.15)
            if spec.biases:
                tensors[f"blk.{layer}.{name}.bias"] = normal(shapes[name][0], scale=0.1)
    tensors["output_norm.weight"] = 1 + normal(spec.hidden, scale=0.1)
    if not spec.tied:
        tensors["output.weight"] = normal(512, spec.hidden, scale=0.15)
    if spec.llama3:
        tensors["rope_freqs.weight"] = llama3_divisors(spec.theta, spec.rope_dim or spec.head_dim)
    return tensors


def llama3_divisors(
    theta: float, dim: int, factor: float = 8.0, low: float = 1.0, high: float = 4.0, original: int = 64
) -> npt.NDArray[np.float32]:
    """What each frequency is divided by under llama 3.1's rule, one frequency at a time."""
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / dim)
        turns = original / wavelength
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(factor)
        else:
            share = (turns - low) / (high - low)
            divisors.append(1.0 / ((1 - share) / factor + share))
    return np.array(divisors, np.float32)


# -- the same checkpoint computed from the textbook, in float64 -------------------------------------------------------
def textbook_logits(path: Path, input_ids: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Logits of one sequence, [tokens, vocab]: float64, one position and one head at a time, no cache, no batch."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    tensor = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        .astype(np.float64)
        .reshape(tuple(int(n) for n in t.shape)[::-1])
        for t in reader.tensors
    }
    heads, kv_heads = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
    dim = keys.get("llama.attention.key_length", keys["llama.embedding_length"] // heads)
    eps = keys["llama.attention.layer_norm_rms_epsilon"]
    window = keys.get("llama.attention.sliding_window") or keys["llama.context_length"]
    turn = rotations(keys, tensor.get("rope_freqs.weight"), dim, len(np.asarray(input_ids)))

    def project(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        return x @ tensor[f"{name}.weight"].T + tensor.get(f"{name}.bias", 0.0)

    def norm(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * tensor[name]

    x = tensor["token_embd.weight"][np.asarray(input_ids)]
    for layer in range(keys["llama.block_count"]):
        block = f"blk.{layer}."
        y = norm(x, block + "attn_norm.weight")
        q, k, v = (project(y, block + name).reshape(len(x), -1, dim) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = rotate(q, turn), rotate(k, turn)
        mixed = np.zeros_like(q)
        for position in range(len(x)):
            for head in range(heads):
                shared = head // (heads // kv_heads)
                seen = slice(max(0, position + 1 - window), position + 1)
                scores = k[seen, shared] @ q[position, head] / np.sqrt(dim)
                share = np.exp(scores - scores.max())
                mixed[position, head] = share / share.sum() @ v[seen, shared]
        x = x + project(mixed.reshape(len(x), -1), block + "attn_output")
        y = norm(x, block + "ffn_norm.weight")
        gate = project(y, block + "ffn_gate")
        x = x + project(gate / (1 + np.exp(-gate)) * project(y, block + "ffn_up"), block + "ffn_down")
    return norm(x, "output_norm.weight") @ tensor.get("output.weight", tensor["token_embd.weight"]).T


def rotations(
    keys: Mapping[str, Any], divisors: npt.NDArray[np.float64] | None, head_dim: int, tokens: int
) -> npt.NDArray[np.complex128]:
    """Each position's turn of each pair as a complex number, [tokens, pairs], YaRN's magnitude included."""
    dim = keys.get("llama.rope.dimension_count", head_dim)
    theta = keys.get("llama.rope.freq_base", 10000.0)
    factor = keys.get("llama.rope.scaling.factor", 1.0)
    kind = keys.get("llama.rope.scaling.type", "linear")
    magnitude = keys.get("llama.rope.scaling.attn_factor", 1.0)
    turns = []
    if kind == "yarn":
        original = keys.get("llama.rope.scaling.original_context_length", keys["llama.context_length"])
        fast = keys.get("llama.rope.scaling.yarn_beta_fast", 32.0)
        slow = keys.get("llama.rope.scaling.yarn_beta_slow", 1.0)
        first = max(0, np.floor(dim / 2 * np.log(original / (2 * np.pi * fast)) / np.log(theta)))
        last = min(dim - 1, np.ceil(dim / 2 * np.log(original / (2 * np.pi * slow)) / np.log(theta)))
        magnitude *= 1 + 0.1 * np.log(factor)
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        if divisors is not None:
            frequency /= divisors[pair]
        if kind == "linear" or (kind == "yarn" and pair >= last):
            frequency /= factor
        elif kind == "yarn" and pair > first:
            blend = (pair - first) / (last - first)
            frequency = frequency * (1 - blend) + frequency / factor * blend
        turns.append(frequency)
    return magnitude * np.exp(1j * np.outer(np.arange(tokens), turns))


def rotate(x: npt.NDArray[np.float64], turn: npt.NDArray[np.complex128]) -> npt.NDArray[np.float64]:
    """Turn neighbors (0, 1), (2, 3), … of every head as the two parts of a complex number. x: [tokens, heads, dim]."""
    rotated = 2 * turn.shape[1]
    pairs = (x[..., 0:rotated:2] + 1j * x[..., 1:rotated:2]) * turn[:, None, :]
    out = x.copy()
    out[..., 0:rotated:2], out[..., 1:rotated:2] = pairs.real, pairs.imag
    return out
