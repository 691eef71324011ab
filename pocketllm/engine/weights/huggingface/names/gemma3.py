"""Gemma3ForCausalLM, and the text part of Gemma3ForConditionalGeneration: norms are stored without their 1; local and
global layers rotate with bases of their own.
"""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    Config,
    Mapped,
    Rule,
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
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("gemma3_text", "gemma3")
ARCHITECTURE = "gemma3"
TIED = True
"""What a config.json without the word means."""
NORMS_AROUND = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("post_attention_norm"),
    "pre_feedforward_layernorm": Rule("ffn_norm"),
    "post_feedforward_layernorm": Rule("post_ffw_norm"),
}
"""Before and after each half of a layer; Gemma 2 has the same."""
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
LAYERS_OF_27B = 62
"""The one size whose scores are divided by the root of hidden / heads: GGUF has no key for it, its family knows."""


def read(config: Config) -> Mapped:
    """Keys, names, and norms with their 1."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.require(name, None)
    config.require("use_bidirectional_attention", False, None)
    check_scale(config, LAYERS_OF_27B)
    keys = rotary(config.rope("full_attention")) | {
        "attention.sliding_window": config.count("sliding_window"),
        "attention.sliding_window_pattern": local_layers(config, config.count("sliding_window_pattern", 6)),
        "rope.freq_base_swa": _local_base(config),
    }
    rules = layers(config, merged(ATTENTION, FEED_FORWARD, computed(merged(NORMS_AROUND, HEAD_NORMS), plus_one)))
    return Mapped(
        decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, keys), around(plus_one) | rules, ignored=IMAGES
    )


def _local_base(config: Config) -> float:
    if isinstance(config.values.get("rope_parameters"), dict):
        local = config.rope("sliding_attention")
        local.require("rope_type", "default")
        return local.number("rope_theta", 10000.0)
    return config.number("rope_local_base_freq", 10000.0)


def check_scale(config: Config, layers_of_27b: int) -> None:
    """CheckpointError for scores that are divided by anything but what the family knows of its size."""
    is_27b = config.count("num_hidden_layers") == layers_of_27b
    expected = config.count("hidden_size") // config.count("num_attention_heads") if is_27b else config.head_dim
    if config.number("query_pre_attn_scalar", expected) != expected:
        raise CheckpointError(
            f"config.json: query_pre_attn_scalar is {config.values['query_pre_attn_scalar']!r:.40}, "
            f"but only {expected} can be computed here for {config.count('num_hidden_layers')} layers"
        )
