"""Make Hugging Face directories that hold what a tiny GGUF of `tests/tiny.py` holds, without a library for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tiny import TinyLlama, vocabulary, weights

Array = npt.NDArray[Any]
DTYPES = {"uint8": "U8", "float32": "F32", "float16": "F16"}
NAMES = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_safetensors(path: Path, tensors: Mapping[str, Array | tuple[str, Array]]) -> Path:
    """A file of these tensors; a pair names the element type of bytes."""
    header, data = {}, b""
    for name, given_as in tensors.items():
        kind, values = given_as if isinstance(given_as, tuple) else (DTYPES[given_as.dtype.name], given_as)
        raw = values.tobytes()
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_directory(folder: Path, spec: TinyLlama) -> Path:
    """The same weights, vocabulary and chat template as `write_llama` would put into a file."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.theta,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    write_safetensors(folder / "model.safetensors", {name_of(name): in_halves(name, values, spec)
                                                     for name, values in weights(spec).items()})  # fmt: skip
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json with the tokens and merges of the committed oracle, and its settings."""
    keys = {name.removeprefix("tokenizer."): value for name, value in vocabulary().items()}
    tokens, kinds = keys["ggml.tokens"], keys["ggml.token_type"]
    tokenizer = {
        "added_tokens": [
            {"id": number, "content": text, "special": True}
            for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == 3
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": keys["ggml.merges"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": keys["chat_template"], "eos_token": tokens[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def name_of(name: str) -> str:
    """`blk.1.attn_q.weight` → `model.layers.1.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        part, kind = name.split(".")
        return f"{WHOLE[part]}.{kind}"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def in_halves(name: str, values: Array, spec: TinyLlama) -> Array:
    """Rows of queries and keys so that the halves of a head rotate together, not neighbors."""
    if "attn_q." not in name and "attn_k." not in name:
        return values
    by_pair = values.reshape(-1, spec.head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(values.shape)
