"""The outside oracle: transformers' own llama over weights that gguf-py decoded, in float32, eager.

`python -m tests.parity.transformers_oracle` writes the logits that the ordinary tests compare with, so that those need
no transformers. Needs the oracle extra.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.tiny import TinyLlama, write_llama

ORACLES = Path(__file__).parents[1] / "oracles"

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
SPECS: Mapping[str, TinyLlama] = {
    "yarn": TinyLlama(seed=11, head_dim=32, scaling=YARN),
    "yarn_betas": TinyLlama(
        seed=12,
        head_dim=24,
        scaling={**YARN, "factor": 8.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "attn_factor": 0.75},
    ),
    "llama3": TinyLlama(seed=13, theta=500000.0, llama3=True),
    "linear": TinyLlama(seed=14, scaling={"type": "linear", "factor": 4.0}),
    "biases_tied": TinyLlama(seed=15, hidden=48, biases=True, tied=True, num_heads=6, num_kv_heads=2, head_dim=20),
}
"""Checkpoints of tests/tiny.py whose logits are committed as oracles/llama_<name>.npz."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""What `llama3_divisors` writes into a file, as transformers says it."""


@dataclass(frozen=True)
class GGUFContents:
    """A checkpoint as gguf-py reads it: keys, and every tensor in float32."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[np.float32]]

    @classmethod
    def read(cls, path: Path) -> "GGUFContents":
        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        tensors = {
            t.name: t.data if t.tensor_type.name == "I32" else gguf.quants.dequantize(t.data, t.tensor_type)
            for t in reader.tensors
        }
        return cls(keys, tensors)


def rope_parameters(contents: GGUFContents) -> dict[str, Any]:
    """GGUF's rope keys as transformers says them."""
    scaling = {
        key.removeprefix("llama.rope.scaling."): value
        for key, value in contents.keys.items()
        if key.startswith("llama.rope.scaling.")
    }
    theta = float(contents.keys.get("llama.rope.freq_base", 10000.0))
    if "rope_freqs.weight" in contents.tensors:
        return {**LLAMA3, "rope_theta": theta}
    if scaling.get("type") == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": scaling["factor"]}
    if scaling.get("type") == "yarn":
        magnitude = scaling.get("attn_factor", 1.0) * (1 + 0.1 * np.log(scaling["factor"]))
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_context_length"],
            "beta_fast": scaling.get("yarn_beta_fast", 32.0),
            "beta_slow": scaling.get("yarn_beta_slow", 1.0),
            "attention_factor": magnitude,
        }
    return {"rope_type": "default", "rope_theta": theta}


def load_llama(path: Path) -> Any:
    """A LlamaForCausalLM with a GGUF's weights, q and k rows put back into transformers' order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    contents = GGUFContents.read(path)
    keys, tensors = contents.keys, contents.tensors
    heads, kv_heads = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=keys["llama.embedding_length"],
        intermediate_size=keys["llama.feed_forward_length"],
        num_hidden_layers=keys["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=keys.get("llama.attention.key_length", keys["llama.embedding_length"] // heads),
        max_position_embeddings=keys["llama.context_length"],
        rms_norm_eps=keys["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters=rope_parameters(contents),
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {NAMES.get(name, name): values for name, values in tensors.items() if name != "rope_freqs.weight"}
    for name in list(state):
        if name.startswith("blk."):
            state[layer_name(name)] = in_transformers_order(name, state.pop(name), heads, kv_heads)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    loaded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    model.load_state_dict(loaded, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.eval()


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def layer_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    _, number, part, kind = name.split(".")
    return f"model.layers.{number}.{NAMES[part]}.{kind}"


def in_transformers_order(
    name: str, values: npt.NDArray[np.float32], heads: int, kv_heads: int
) -> npt.NDArray[np.float32]:
    """q and k rows of each head from neighbors (0, 1), (2, 3), … back to halves (0, d/2), …; others unchanged."""
    part = name.split(".")[2]
    if part not in ("attn_q", "attn_k"):
        return values
    count = heads if part == "attn_q" else kv_heads
    by_pair = values.reshape(count, len(values) // count // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)


def logits(model: Any, input_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Logits of one sequence, all positions at once: [tokens, vocab]."""
    import torch

    with torch.inference_mode():
        out = model(input_ids=torch.from_numpy(input_ids)[None], use_cache=False).logits[0]
    values: npt.NDArray[np.float32] = out.numpy()
    return values


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 48 tokens that a committed oracle was asked about; past YaRN's original context on purpose."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 48)


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            path = write_llama(Path(work) / f"{name}.gguf", spec)
            ids = oracle_ids(name)
            np.savez_compressed(folder / f"llama_{name}.npz", input_ids=ids, logits=logits(load_llama(path), ids))
            print(f"llama_{name}.npz")


def write_smollm2(folder: Path) -> None:
    """The default model on a page of real text: the five likeliest tokens at every fourth of 256 positions."""
    from pocketllm.engine.text.tokenizer import Tokenizer
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from tests.parity.compare import log_softmax

    path = resolve_model("smollm2-135m", print)
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    text = (Path(__file__).parent / "alice.txt").read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text)[:256], np.int64)
    logprobs = log_softmax(logits(load_llama(path), ids)[::4])
    top_ids = np.argsort(-logprobs, axis=-1)[:, :5]
    top_logprobs = np.take_along_axis(logprobs, top_ids, axis=-1)
    np.savez_compressed(folder / "smollm2_top5.npz", input_ids=ids, top_ids=top_ids, top_logprobs=top_logprobs)
    print("smollm2_top5.npz")


if __name__ == "__main__":
    write_oracles(ORACLES)
    write_smollm2(ORACLES)
