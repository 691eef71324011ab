"""LlamaForCausalLM and MistralForCausalLM: GGUF pairs neighbors of a head where transformers pairs its halves; the
rope of llama 3 is a tensor.
"""

import math

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    Config,
    Mapped,
    Order,
    Rule,
    around,
    decoder,
    layers,
    merged,
    prefixed,
    rotary,
)

MODEL_TYPES = ("llama", "mistral")
ARCHITECTURE = "llama"
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}


def read(config: Config) -> Mapped:
    """Keys, names and the rows of queries and keys in the order that rotates neighbors."""
    config.require("hidden_act", "silu")
    rope = config.rope()
    made = {"rope_freqs.weight": divisors(rope, config.head_dim)} if rope.values["rope_type"] == "llama3" else {}
    own = {"rope.dimension_count": config.head_dim, "attention.sliding_window": window(config)}
    keys = prefixed(ARCHITECTURE, {**rotary(rope), **own})
    return Mapped(decoder(ARCHITECTURE, config) | keys, turned_rules(config), made)


def turned_rules(config: Config) -> dict[str, Rule]:
    """Rules of a decoder whose heads rotate neighbors."""
    heads = config.count("num_attention_heads")
    queries = neighbors(heads, config.head_dim)
    key_rows = neighbors(config.count("num_key_value_heads", heads), config.head_dim)
    turned = {"self_attn.q_proj": Rule("attn_q", queries), "self_attn.k_proj": Rule("attn_k", key_rows)}
    return around() | layers(config, merged(ATTENTION, turned, FEED_FORWARD, NORMS))


def window(config: Config) -> int:
    """How many tokens all layers of a mistral see, 0 for all of them; one that does not say it sees 4096."""
    is_windowed = config.values.get("model_type") == "mistral" and config.values.get("sliding_window", 4096) is not None
    return config.count("sliding_window", 4096) if is_windowed else 0


def neighbors(num_heads: int, head_dim: int) -> Order:
    """Rows of each head from halves (0, d/2), (1, d/2 + 1), … to neighbors."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).ravel()


def divisors(rope: Config, dim: int) -> npt.NDArray[np.float32]:
    """What llama 3.1 divides each frequency by: 1 for short waves, `factor` for long ones, and a ramp between."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    context = rope.count("original_max_position_embeddings")
    inverse = rope.number("rope_theta", 10000.0) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = context * inverse / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)
