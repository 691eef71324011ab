"""Qwen3ForCausalLM: names alone differ."""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
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

MODEL_TYPES = ("qwen3",)
ARCHITECTURE = "qwen3"
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False, None)
    keys = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, rotary(config.rope()))
    return Mapped(keys, around() | layers(config, merged(ATTENTION, FEED_FORWARD, NORMS, HEAD_NORMS)))
