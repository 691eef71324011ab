"""Qwen2ForCausalLM: names alone differ."""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    Config,
    Mapped,
    around,
    decoder,
    layers,
    merged,
    prefixed,
    rotary,
)

MODEL_TYPES = ("qwen2",)
ARCHITECTURE = "qwen2"
DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False, None)
    keys = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, rotary(config.rope()))
    return Mapped(keys, around() | layers(config, merged(ATTENTION, FEED_FORWARD, NORMS)))
