"""The outside oracle for gemma4: transformers over a GGUF's weights, in float32, eager.

`python -m tests.parity.gemma4_oracle` writes the logits that the ordinary tests compare with. Needs the oracle extra.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.recurrent_oracle import Keys, decoder
from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
ROTATED_SHARE = 0.25
DIVISORS = np.where(np.arange(16) < 4, 1.0, 1e30).astype(np.float32)
"""Of the 16 pairs of a global head, a quarter rotates."""
SCALES = {f"blk.{n}.layer_output_scale.weight": np.array([0.7 + 0.1 * n], np.float32) for n in range(4)}
EXPERT_SCALES = {
    f"blk.{n}.ffn_down_exps.scale": np.random.RandomState(n).uniform(0.5, 1.5, 6).astype(np.float32) for n in range(4)
}
SPECS: Mapping[str, TinyFamily] = {
    "gemma4_keys_for_values": TinyFamily(
        "gemma4",
        51,
        {"attention.head_count_kv": [4, 1, 4, 1], "final_logit_softcapping": 2.0},
        tensors={"rope_freqs.weight": DIVISORS, "blk.1.attn_v.weight": None, "blk.3.attn_v.weight": None, **SCALES},
    ),
    "gemma4_shared_keys": TinyFamily(
        "gemma4",
        52,
        {"attention.shared_kv_layers": 2, "feed_forward_length": [96, 96, 192, 192], "rope.freq_base": 1e6},
        tensors={"rope_freqs.weight": DIVISORS, **SCALES},
    ),
    "gemma4_no_own_inputs": TinyFamily("gemma4", 53, {"embedding_length_per_layer_input": 0}),
    "gemma4_mixture": TinyFamily(
        "gemma4",
        54,
        {
            "embedding_length_per_layer_input": 0,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
        },
        tensors={**SCALES, **EXPERT_SCALES},
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

GLOBAL = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
NAMES = {
    "attn_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffw_norm": "post_feedforward_layernorm.weight",
    **{f"attn_{part}": f"self_attn.{part}_proj.weight" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    "attn_output": "self_attn.o_proj.weight",
    **{f"ffn_{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "inp_gate": "per_layer_input_gate.weight",
    "proj": "per_layer_projection.weight",
    "post_norm": "post_per_layer_input_norm.weight",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2.weight",
    **{f"post_ffw_norm_{part}": f"post_feedforward_layernorm_{part}.weight" for part in (1, 2)},
}


def load_model(path: Path) -> Any:
    """A model of transformers with a GGUF's weights."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    contents = GGUFContents.read(path)
    config = Gemma4TextConfig(**arguments(Keys("gemma4", contents)))
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
    state = {f"model.layers.{n}.layer_scalar": np.ones(1, np.float32) for n in range(config.num_hidden_layers)}
    for name, values in contents.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            own = ".".join(parts[2:]).removesuffix(".weight")
            state[f"model.layers.{parts[1]}.{NAMES[own]}"] = values
        elif parts[0] != "rope_freqs":
            state[f"model.{GLOBAL[parts[0]]}.weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    loaded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    # a layer that reads others' keys has none in transformers; GGUF's may, and nobody reads them
    unread = model.load_state_dict(loaded, strict=False, assign=True)
    assert not unread.missing_keys, unread.missing_keys
    assert all(".self_attn." in name for name in unread.unexpected_keys), unread.unexpected_keys
    # buffers are computed, not loaded
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for table in (model.model.embed_tokens, getattr(model.model, "embed_tokens_per_layer", None)):
        if table is not None:
            table.embed_scale = torch.tensor(table.scalar_embed_scale)
    return model.eval()


def arguments(key: Keys) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configuration."""
    is_local, layers = key("attention.sliding_window_pattern"), key("block_count")
    counts = key("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * layers
    inner = key("feed_forward_length")
    rotated = ROTATED_SHARE if "rope_freqs.weight" in key.tensors else 1.0
    theta = float(key("rope.freq_base", 10000.0))
    return decoder(key) | {
        "intermediate_size": inner[0] if isinstance(inner, list) else inner,
        "use_double_wide_mlp": isinstance(inner, list),
        "head_dim": key("attention.key_length_swa"),
        "global_head_dim": key("attention.key_length"),
        "num_key_value_heads": counts[is_local.index(True)],
        "num_global_key_value_heads": counts[is_local.index(False)],
        "attention_k_eq_v": "blk.1.attn_v.weight" not in key.tensors,
        "num_kv_shared_layers": key("attention.shared_kv_layers", 0),
        "sliding_window": key("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "enable_moe_block": bool(key("expert_count")),
        "num_experts": key("expert_count"),
        "top_k_experts": key("expert_used_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "hidden_size_per_layer_input": key("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": 512,
        "final_logit_softcapping": key("final_logit_softcapping"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(key("rope.freq_base_swa", 10000.0))},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": rotated,
                "rope_theta": theta,
            },
        },
    }


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 40 tokens that a committed oracle was asked about."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 40)


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            path = write_family(Path(work) / f"{name}.gguf", spec)
            ids = oracle_ids(name)
            np.savez_compressed(folder / f"{name}.npz", input_ids=ids, logits=logits(load_model(path), ids))
            print(f"{name}.npz")


if __name__ == "__main__":
    write_oracles(ORACLES)
