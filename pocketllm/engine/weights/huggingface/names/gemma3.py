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

MODEL_TYPES = ("gemma3_text", "gemma3")
ARCHITECTURE = "gemma3"
DEFAULTS = {
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 4096,
}
"""Published directories of models that see images say little more of their text part than its width and depth."""
NORMS_AROUND = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("post_attention_norm"),
    "pre_feedforward_layernorm": Rule("ffn_norm"),
    "post_feedforward_layernorm": Rule("post_ffw_norm"),
}
"""Before and after each half of a layer; Gemma 2 has the same."""
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def read(config: Config) -> Mapped:
    """Keys, names, and norms with their 1."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("attn_logit_softcapping", None)
    config.require("use_bidirectional_attention", False, None)
    keys = {
        **rotary(config.rope("full_attention")),
        **scores(config),
        **logit_cap(config),
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


def logit_cap(config: Config) -> dict[str, float]:
    """What logits are held to, if they are."""
    said = config.values.get("final_logit_softcapping")
    return {} if said is None else {"final_logit_softcapping": config.number("final_logit_softcapping")}


def scores(config: Config) -> dict[str, float]:
    """What scores are multiplied by, where the config says it; a family knows it for files, which do not."""
    scalar = config.values.get("query_pre_attn_scalar")
    return {} if scalar is None else {"attention.scale": config.number("query_pre_attn_scalar") ** -0.5}
