"""Gemma2ForCausalLM: norms are stored without their 1; scores and logits are capped."""

from pocketllm.engine.weights.huggingface.names.gemma3 import NORMS_AROUND, scores
from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    Config,
    Mapped,
    around,
    computed,
    decoder,
    layers,
    local_layers,
    merged,
    plus_one,
    prefixed,
    rotary,
)

MODEL_TYPES = ("gemma2",)
ARCHITECTURE = "gemma2"
DEFAULTS = {
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def read(config: Config) -> Mapped:
    """Keys, names, and norms with their 1."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", False, None)
    keys = {
        **rotary(config.rope()),
        **scores(config),
        "attention.sliding_window": config.count("sliding_window", 4096),
        "attention.sliding_window_pattern": local_layers(config, period=2),
        "attn_logit_softcapping": config.number("attn_logit_softcapping"),
        "final_logit_softcapping": config.number("final_logit_softcapping"),
    }
    rules = around(plus_one) | layers(config, merged(ATTENTION, FEED_FORWARD, computed(NORMS_AROUND, plus_one)))
    return Mapped(decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, keys), rules)
