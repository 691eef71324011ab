"""The outside oracle for qwen4exp: transformers over a GGUF's weights, in float32, eager.

`python -m tests.parity.qwen4exp_oracle` writes the logits that the ordinary tests compare with. Needs the oracle extra.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.recurrent_oracle import (
    Array,
    Keys,
    delta_net,
    experts,
    feed_forward,
    grouped,
    hybrid,
    hybrid_attention,
)
from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
SIZES = [61, 67, 71, 73, 79, 83]
"""Primes from 60 on, one for each head: transformers finds them from where they begin."""


def ids_of(seed: int) -> npt.NDArray[np.int64]:
    """The 40 tokens that a committed oracle was asked about."""
    return np.random.RandomState(seed + 1000).randint(0, 512, 40)


SPECS: Mapping[str, TinyFamily] = {
    "qwen4exp_long_ngrams": TinyFamily(
        "qwen4exp",
        54,
        {
            "ssm.group_count": 3,
            "ssm.time_step_rank": 6,
            "ssm.state_size": 12,
            "ssm.inner_size": 120,
            "full_attention_interval": 2,
            "attention.compress_ratios": [0, 3, 0, 3],
            "attention.indexer.head_count": 20,
            "attention.indexer.key_length": 24,
            "attention.indexer.top_k": 9,
            "hyper_connection.count": 3,
            "hyper_connection.low_rank": 5,
            "ple.layers": [2],
            "ple.ngram_size": 4,
            "ple.conv_kernel": 3,
            "ple.eos_token_id": int(ids_of(54)[10]),
            "ple.layer_multipliers": [1000003, 48271, 16777619, 69069],
            "ple.head_vocab_sizes": SIZES,
            "ple.head_offsets": [sum(SIZES[:head]) for head in range(6)],
        },
        tied=False,
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

GLOBAL = {"token_embd": "model.embed_tokens", "output": "lm_head"}
MIXER = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}


def load_model(path: Path) -> Any:
    """A model of transformers with a GGUF's weights."""
    import torch
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    contents = GGUFContents.read(path)
    key = Keys("qwen4exp", contents)
    config = Qwen4ExpTextConfig(**arguments(key))
    with torch.device("meta"):
        model = Qwen4ExpForCausalLM(config)
    state: dict[str, Array] = {}
    blocks: dict[int, dict[str, Array]] = {}
    for name, values in contents.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            blocks.setdefault(int(parts[1]), {})[".".join(parts[2:]).removesuffix(".weight")] = values
        elif parts[0] in GLOBAL:
            state[f"{GLOBAL[parts[0]]}.weight"] = values
    state |= mixer(contents.tensors, "output_hc_{}.weight", "model.hyper_connection_mixer")
    for number, tensors in blocks.items():
        state |= {f"model.layers.{number}.{name}": values for name, values in layer(tensors, config).items()}
    embedding = f"model.layers.{key('ple.layers')[0]}.ple.ple_embedding."
    state[f"{embedding}ngram_embedding.weight"] = contents.tensors["per_layer_token_embd.weight"]
    loaded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    numbers = {"layer_multipliers": "layer_multipliers", "ngram_heads_vocab_sizes": "head_vocab_sizes"}
    for own, name in {**numbers, "ngram_heads_offsets": "head_offsets"}.items():
        loaded[embedding + own] = torch.tensor(key(f"ple.{name}"), dtype=torch.int64)
    loaded.setdefault("lm_head.weight", loaded["model.embed_tokens.weight"])
    model.load_state_dict(loaded, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.eval()


def arguments(key: Keys) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configuration."""
    found = hybrid(key) | experts(key)
    kinds = ["linear_attention" if kind == "linear_attention" else "indexed_attention" for kind in found["layer_types"]]
    heads = len(key("ple.head_vocab_sizes"))
    return found | {
        "layer_types": kinds,
        "output_gate_type": "sigmoid",
        "hc_count": key("hyper_connection.count"),
        "hc_lowrank": key("hyper_connection.low_rank"),
        "indexer_n_heads": key("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": key("attention.indexer.key_length"),
        "indexer_budget": key("attention.indexer.top_k"),
        "indexer_compress_ratio": max(key("attention.compress_ratios")),
        "ple_layer_ids": [layer + 1 for layer in key("ple.layers")],
        "ple_embed_dim": heads * key("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": key("ple.conv_kernel"),
        "ngram_size": key("ple.ngram_size"),
        "heads_per_ngram": key("ple.heads_per_ngram"),
        "ngram_vocab_size_base": 60,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "eos_token_id": key("ple.eos_token_id"),
    }


def mixer(tensors: Mapping[str, Array], pattern: str, prefix: str) -> dict[str, Array]:
    """What reads the streams, and how they are written."""
    found = {own: tensors[pattern.format(name)] for name, own in MIXER.items() if pattern.format(name) in tensors}
    return {f"{prefix}.{own}.weight": values - (own == "hc_norm") for own, values in found.items()}


def layer(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    """One block."""
    found = mixer(tensors, "hc_attn_{}", "attn_hyper_connection") | mixer(tensors, "hc_ffn_{}", "mlp_hyper_connection")
    found |= feed_forward(tensors)
    if "attn_q" in tensors:
        found |= hybrid_attention(tensors)
        keys = [tensors["indexer.q_proj"], tensors["indexer.k_proj"]]
        found["self_attn.indexer.index_qk_proj.weight"] = np.concatenate(keys)
        for part in "qk":
            found[f"self_attn.indexer.{part}_layernorm.weight"] = tensors[f"indexer.{part}_norm"] - 1
    else:
        own = grouped(tensors, config)
        names = {"qkv": "attn_qkv", "z": "attn_gate", "a": "ssm_alpha", "b": "ssm_beta"}
        found |= delta_net(own) | {f"linear_attn.in_proj_{part}.weight": own[name] for part, name in names.items()}
    if "ple_key" in tensors:
        found |= {f"ple.{part}_proj.weight": tensors[f"ple_{part}"] for part in ("key", "value")}
        found |= {f"ple.norm_{part}.weight": tensors[f"ple_norm_{part}"] - 1 for part in ("key", "query", "conv")}
        found["ple.conv1d.weight"] = tensors["ple_conv1d"][:, None]
    return found


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            path = write_family(Path(work) / f"{name}.gguf", spec)
            ids = ids_of(spec.seed)
            np.savez_compressed(folder / f"{name}.npz", input_ids=ids, logits=logits(load_model(path), ids))
            print(f"{name}.npz")


if __name__ == "__main__":
    write_oracles(ORACLES)
