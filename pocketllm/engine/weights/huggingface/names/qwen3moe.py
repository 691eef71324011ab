"""Qwen3MoeForCausalLM: names alone differ, and experts lie one by one."""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    HEAD_NORMS,
    NORMS,
    Config,
    Mapped,
    Rule,
    around,
    decoder,
    experts,
    fused_experts,
    in_layers,
    layers,
    merged,
    prefixed,
    rotary,
    sequence,
    shared_in_layers,
)
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("qwen3_moe",)
ARCHITECTURE = "qwen3moe"
DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False, None)
    config.require("decoder_sparse_step", 1, None)
    if sequence(config.values.get("mlp_only_layers")):
        raise CheckpointError("config.json: mlp_only_layers names layers, but only experts in every layer are computed")
    number, intermediate = config.num_experts, config.count("moe_intermediate_size")
    keys = rotary(config.rope()) | {
        "expert_count": number,
        "expert_used_count": config.count("num_experts_per_tok"),
        "expert_feed_forward_length": intermediate,
        "expert_weights_norm": bool(config.values.get("norm_topk_prob", False)),
    }
    plain = layers(config, merged(ATTENTION, NORMS, HEAD_NORMS, {"mlp.gate": Rule("ffn_gate_inp")}))
    rules = around() | plain | in_layers(config, experts(number))
    shared = shared_in_layers(config, fused_experts(intermediate))
    return Mapped(decoder(ARCHITECTURE, config, intermediate) | prefixed(ARCHITECTURE, keys), rules, shared=shared)
