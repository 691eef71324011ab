"""The outside oracle for deepseek4: transformers over a GGUF's weights, in float32, eager.

`python -m tests.parity.deepseek4_oracle` writes the logits that ordinary tests compare with. Needs the oracle extra.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.recurrent_oracle import Keys
from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
Array = npt.NDArray[Any]

SPECS: Mapping[str, TinyFamily] = {
    "deepseek4_tight_limits": TinyFamily(
        "deepseek4",
        61,
        {
            "block_count": 5,
            "attention.head_count": 6,
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.sliding_window": 5,
            "attention.output_group_count": 3,
            "attention.compress_ratios": [6, 4, 0, 6, 4],
            "attention.compress_rope_freq_base": 90000.0,
            "attention.indexer.head_count": 20,
            "attention.indexer.key_length": 12,
            "attention.indexer.top_k": 3,
            "rope.dimension_count": 8,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 24,
            "expert_used_count": 3,
            "expert_weights_scale": 2.5,
            "swiglu_clamp_exp": [0.2] * 5,
            "swiglu_clamp_shexp": [0.2] * 5,
            "hyper_connection.count": 3,
            "hyper_connection.sinkhorn_iterations": 4,
            "hyper_connection.epsilon": 1e-2,
            "hash_layer_count": 2,
        },
        tied=False,
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
COMPRESSOR = {"kv": "kv_proj.weight", "gate": "gate_proj.weight", "ape": "position_bias", "norm": "kv_norm.weight"}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"hc_{half}_{part}.weight": f"{half}_hc.{part}" for half in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{f"attn_compressor_{part}.weight": f"self_attn.compressor.{name}" for part, name in COMPRESSOR.items()},
    **{f"indexer_compressor_{part}.weight": f"self_attn.compressor.indexer.{n}" for part, n in COMPRESSOR.items()},
}


def load_model(path: Path) -> Any:
    """A model of transformers with a GGUF's weights."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    contents = GGUFContents.read(path)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**arguments(Keys("deepseek4", contents))))
    state: dict[str, Array] = {}
    for name, values in contents.tensors.items():
        _, _, part = name.split(".", 2) if name.startswith("blk.") else ("", "", name)
        own = f"model.layers.{name.split('.')[1]}."
        if part in LAYER:
            state[own + LAYER[part]] = values
        elif part == "ffn_gate_exps.weight":
            up = contents.tensors[name.replace("gate", "up")]
            state[f"{own}mlp.experts.gate_up_proj"] = np.concatenate([values, up], axis=1)
        elif part != "ffn_up_exps.weight":
            state[GLOBAL[part]] = values
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    loaded = {name: torch.from_numpy(np.array(values)) for name, values in state.items()}
    loaded |= {name: values.long() for name, values in loaded.items() if name.endswith("tid2eid")}
    model.load_state_dict(loaded, strict=True)
    return model.eval()


def arguments(key: Keys) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configuration."""
    ratios = list(key("attention.compress_ratios"))[: key("block_count")]
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    head_dim, limits = key("attention.key_length"), {*key("swiglu_clamp_exp"), *key("swiglu_clamp_shexp")}
    [limit] = limits
    scaling: dict[str, Any] = {"rope_type": "default"}
    if key("rope.scaling.type", None) == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": key("rope.scaling.factor"),
            "original_max_position_embeddings": key("rope.scaling.original_context_length"),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    return {
        "vocab_size": 512,
        "hidden_size": key("embedding_length"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "head_dim": head_dim,
        "q_lora_rank": key("attention.q_lora_rank"),
        "num_experts_per_tok": key("expert_used_count"),
        "n_routed_experts": key("expert_count"),
        "routed_scaling_factor": key("expert_weights_scale"),
        "max_position_embeddings": key("context_length"),
        "rope_theta": key("rope.freq_base"),
        "layer_types": [kinds.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        "compress_rates": {kinds[4]: 4, "heavily_compressed_attention": max({*ratios} - {0, 4}, default=128)},
        "compress_rope_theta": key("attention.compress_rope_freq_base"),
        "hc_mult": key("hyper_connection.count"),
        "hc_sinkhorn_iters": key("hyper_connection.sinkhorn_iterations"),
        "hc_eps": key("hyper_connection.epsilon"),
        "num_hash_layers": key("hash_layer_count", 0),
        "swiglu_limit": limit,
        "sliding_window": key("attention.sliding_window"),
        "o_groups": key("attention.output_group_count"),
        "o_lora_rank": key("attention.output_lora_rank"),
        "index_n_heads": key("attention.indexer.head_count"),
        "index_head_dim": key("attention.indexer.key_length"),
        "index_topk": key("attention.indexer.top_k"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "qk_rope_head_dim": key("rope.dimension_count"),
        "rope_parameters": scaling,
        "attn_implementation": "eager",
    }


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 40 tokens that a committed oracle was asked about; past YaRN's original context on purpose."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 40)


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            ids = oracle_ids(name)
            model = load_model(write_family(Path(work) / f"{name}.gguf", spec))
            np.savez(folder / f"{name}.npz", input_ids=ids, logits=logits(model, ids))


if __name__ == "__main__":
    write_oracles(ORACLES)
