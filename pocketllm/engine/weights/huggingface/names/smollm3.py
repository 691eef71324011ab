"""SmolLM3ForCausalLM: llama's names and rows; every fourth layer does not rotate."""

from pocketllm.engine.weights.huggingface.names.llama import turned_rules
from pocketllm.engine.weights.huggingface.rules import Config, Mapped, decoder, prefixed, rotary, sequence
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("smollm3",)
ARCHITECTURE = "smollm3"
DEFAULTS = {
    "tie_word_embeddings": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
}
PERIOD = 4


def read(config: Config) -> Mapped:
    """Keys, names and the rows of queries and keys in the order that rotates neighbors."""
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False, None)
    config.require("no_rope_layer_interval", PERIOD, None)
    number = config.count("num_hidden_layers")
    rotates = sequence(config.values.get("no_rope_layers"))
    if rotates and rotates != [int((layer + 1) % PERIOD != 0) for layer in range(number)]:
        raise CheckpointError("config.json: no_rope_layers must leave out every fourth layer and no other")
    keys = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, rotary(config.rope()))
    return Mapped(keys, turned_rules(config))
