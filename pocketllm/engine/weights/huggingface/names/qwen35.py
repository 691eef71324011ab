"""Qwen3_5ForCausalLM, and the text part of Qwen3_5ForConditionalGeneration: norms without their 1, value heads by key
head and not tiled, decays as logarithms.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    Config,
    Mapped,
    Order,
    Rule,
    around,
    computed,
    decoder,
    in_layers,
    layers,
    merged,
    plus_one,
    prefixed,
    rotary,
    sequence,
)
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
ARCHITECTURE = "qwen35"
DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
OTHER_PARTS = ("model.visual.", "visual.", "mtp.")
"""Images, and the layer that guesses further tokens."""
NORMS = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("post_attention_norm"),
    **HEAD_NORMS,
}


def read(config: Config) -> Mapped:
    """Keys, names, and everything of a value head in tiled order."""
    keys = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, hybrid_keys(config))
    return Mapped(keys, hybrid_rules(config) | layers(config, FEED_FORWARD), ignored=OTHER_PARTS)


def hybrid_keys(config: Config) -> dict[str, Any]:
    """GGUF keys of the attention and of the recurrent layers."""
    config.require("hidden_act", "silu")
    rope, value_dim = config.rope(), config.count("linear_value_head_dim")
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.25))
    return rotary(rope) | {
        "rope.dimension_count": int(config.head_dim * share),
        "ssm.conv_kernel": config.count("linear_conv_kernel_dim"),
        "ssm.state_size": config.count("linear_key_head_dim"),
        "ssm.group_count": config.count("linear_num_key_heads"),
        "ssm.time_step_rank": config.count("linear_num_value_heads"),
        "ssm.inner_size": config.count("linear_num_value_heads") * value_dim,
        "attention.recurrent_layers": _recurrent(config),
    }


def hybrid_rules(config: Config) -> dict[str, Rule]:
    """Rules of everything but the feed-forwards."""
    plain = layers(config, merged(ATTENTION, computed(NORMS, plus_one)))
    return around(plus_one) | plain | in_layers(config, _recurrent_rules(config))


def _recurrent(config: Config) -> list[bool]:
    number, kinds = config.count("num_hidden_layers"), sequence(config.values.get("layer_types"))
    if not kinds:
        interval = config.count("full_attention_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(number)]
    if len(kinds) != number or set(kinds) - {"linear_attention", "full_attention"}:
        raise CheckpointError("config.json: layer_types must be linear_attention or full_attention for each layer")
    return [kind == "linear_attention" for kind in kinds]


def _recurrent_rules(config: Config) -> dict[str, Rule]:
    """Rules of a layer's Gated DeltaNet part."""
    keys = 2 * config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
    heads, values = tiled(config), values_of(tiled(config), config.count("linear_value_head_dim"))
    channels = np.concatenate([np.arange(keys), keys + values])
    rules = {
        "in_proj_qkv.weight": Rule("attn_qkv.weight", channels),
        "in_proj_z.weight": Rule("attn_gate.weight", values),
        "in_proj_b.weight": Rule("ssm_beta.weight", heads),
        "in_proj_a.weight": Rule("ssm_alpha.weight", heads),
        "conv1d.weight": Rule(
            "ssm_conv1d.weight", channels, shape=(len(channels), config.count("linear_conv_kernel_dim"))
        ),
        "A_log": Rule("ssm_a", heads, compute=minus_exp),
        "dt_bias": Rule("ssm_dt.bias", heads),
        "norm.weight": Rule("ssm_norm.weight"),
        "out_proj.weight": Rule("ssm_out.weight", columns=values),
    }
    return {f"linear_attn.{name}": rule for name, rule in rules.items()}


def tiled(config: Config) -> Order:
    """Value heads so that head j reads key head j mod the number of key heads."""
    key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads is {value_heads}, which {key_heads} key heads cannot share evenly"
        )
    return np.arange(value_heads).reshape(key_heads, -1).T.ravel()


def values_of(heads: Order, value_dim: int) -> Order:
    """The same order of each value of a head."""
    return (heads[:, None] * value_dim + np.arange(value_dim)).ravel()


def minus_exp(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The decay rate of its logarithm."""
    return -np.exp(values)
