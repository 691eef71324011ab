"""Gemma3ForCausalLM: norms are stored without their 1; local and global layers rotate with bases of their own."""

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
    merged,
    plus_one,
    prefixed,
    rotary,
    sequence,
)
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("gemma3_text",)
ARCHITECTURE = "gemma3"
NORMS = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("post_attention_norm"),
    "pre_feedforward_layernorm": Rule("ffn_norm"),
    "post_feedforward_layernorm": Rule("post_ffw_norm"),
    **HEAD_NORMS,
}
LAYERS_OF_27B = 62
"""The one size whose scores are divided by the root of hidden / heads: GGUF has no key for it, its family knows."""


def read(config: Config) -> Mapped:
    """Keys, names, and norms with their 1."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.require(name, None)
    config.require("use_bidirectional_attention", False, None)
    _check_scale(config)
    keys = rotary(config.rope("full_attention")) | {
        "attention.sliding_window": config.count("sliding_window"),
        "attention.sliding_window_pattern": _locals(config),
        "rope.freq_base_swa": _local_base(config),
    }
    rules = layers(config, merged(ATTENTION, FEED_FORWARD, computed(NORMS, plus_one)))
    return Mapped(decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, keys), around(plus_one) | rules, {})


def _locals(config: Config) -> list[bool]:
    """For each layer whether it is local."""
    number = config.count("num_hidden_layers")
    kinds = sequence(config.values.get("layer_types"))
    if not kinds:
        period = config.count("sliding_window_pattern", 6)
        return [(layer + 1) % period != 0 for layer in range(number)]
    if len(kinds) != number or set(kinds) - {"sliding_attention", "full_attention"}:
        raise CheckpointError("config.json: layer_types must be sliding_attention or full_attention for each layer")
    return [kind == "sliding_attention" for kind in kinds]


def _local_base(config: Config) -> float:
    if isinstance(config.values.get("rope_parameters"), dict):
        local = config.rope("sliding_attention")
        local.require("rope_type", "default")
        return local.number("rope_theta", 10000.0)
    return config.number("rope_local_base_freq", 10000.0)


def _check_scale(config: Config) -> None:
    is_27b = config.count("num_hidden_layers") == LAYERS_OF_27B
    expected = config.count("hidden_size") // config.count("num_attention_heads") if is_27b else config.head_dim
    if config.number("query_pre_attn_scalar", expected) != expected:
        raise CheckpointError(
            f"config.json: query_pre_attn_scalar is {config.values['query_pre_attn_scalar']!r:.40}, "
            f"but only {expected} can be computed here for {config.count('num_hidden_layers')} layers"
        )
