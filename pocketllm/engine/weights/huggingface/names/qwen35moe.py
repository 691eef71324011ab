"""Qwen3_5MoeForCausalLM, and the text part of Qwen3_5MoeForConditionalGeneration: qwen35's layers over experts."""

from pocketllm.engine.weights.huggingface.names.qwen35 import OTHER_PARTS, hybrid_keys, hybrid_rules
from pocketllm.engine.weights.huggingface.rules import (
    Config,
    Mapped,
    Rule,
    decoder,
    experts,
    fused_experts,
    in_layers,
    layers,
    prefixed,
    shared_in_layers,
)

MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
ARCHITECTURE = "qwen35moe"
DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
SHARED_EXPERT = {f"mlp.shared_expert.{part}_proj": Rule(f"ffn_{part}_shexp") for part in ("gate", "up", "down")} | {
    "mlp.gate": Rule("ffn_gate_inp"),
    "mlp.shared_expert_gate": Rule("ffn_gate_inp_shexp"),
}


def read(config: Config) -> Mapped:
    """Keys and names."""
    number, intermediate = config.num_experts, config.count("moe_intermediate_size")
    keys = hybrid_keys(config) | {
        "expert_count": number,
        "expert_used_count": config.count("num_experts_per_tok"),
        "expert_feed_forward_length": intermediate,
        "expert_shared_feed_forward_length": config.count("shared_expert_intermediate_size"),
    }
    rules = hybrid_rules(config) | layers(config, SHARED_EXPERT) | in_layers(config, experts(number))
    shared = shared_in_layers(config, fused_experts(intermediate))
    made = decoder(ARCHITECTURE, config, intermediate) | prefixed(ARCHITECTURE, keys)
    return Mapped(made, rules, shared=shared, ignored=OTHER_PARTS)
