"""Olmo2ForCausalLM: names alone differ; norms come after each half of a block."""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    Config,
    Mapped,
    Rule,
    around,
    decoder,
    layers,
    merged,
    prefixed,
    rotary,
)

MODEL_TYPES = ("olmo2",)
ARCHITECTURE = "olmo2"
NORMS = {
    "post_attention_layernorm": Rule("post_attention_norm"),
    "post_feedforward_layernorm": Rule("post_ffw_norm"),
    **HEAD_NORMS,
}


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    keys = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, rotary(config.rope()))
    return Mapped(keys, around() | layers(config, merged(ATTENTION, FEED_FORWARD, NORMS)))
