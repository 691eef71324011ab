"""Olmo2ForCausalLM and Olmo3ForCausalLM: names alone differ; norms come after each half of a block."""

from typing import Any

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
    local_layers,
    merged,
    prefixed,
    rotary,
)

MODEL_TYPES = ("olmo2", "olmo3")
ARCHITECTURE = "olmo2"
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
NORMS = {
    "post_attention_layernorm": Rule("post_attention_norm"),
    "post_feedforward_layernorm": Rule("post_ffw_norm"),
    **HEAD_NORMS,
}


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    is_windowed = config.values.get("model_type") == "olmo3"
    config = Config({"rope_theta": 5e5, **config.values}) if is_windowed else config
    keys = rotary(config.rope("full_attention")) | (windows(config) if is_windowed else {})
    rules = around() | layers(config, merged(ATTENTION, FEED_FORWARD, NORMS))
    return Mapped(decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, keys), rules)


def windows(config: Config) -> dict[str, Any]:
    """What three of four layers see, unless the config says which, and how those rotate: never scaled."""
    found = {
        "attention.sliding_window": config.count("sliding_window", 4096),
        "attention.sliding_window_pattern": local_layers(config, period=4),
    }
    said = config.values.get("rope_parameters")
    if isinstance(said, dict) and isinstance(said.get("sliding_attention"), dict):
        local = config.rope("sliding_attention")
        local.require("rope_type", "default")
        found["rope.freq_base_swa"] = local.number("rope_theta", 10000.0)
    return found
