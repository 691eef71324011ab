"""GptOssForCausalLM: gates and what they let through lie in turn; experts are MXFP4, or plain and transposed."""

from pocketllm.engine.weights.huggingface.rules import (
    ATTENTION,
    Config,
    Mapped,
    Rule,
    around,
    decoder,
    in_layers,
    layers,
    local_layers,
    merged,
    prefixed,
    rotary,
    shared_in_layers,
)
from pocketllm.errors import CheckpointError

MODEL_TYPES = ("gpt_oss",)
ARCHITECTURE = "gpt-oss"
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}
PARTS = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("post_attention_norm"),
    "mlp.router": Rule("ffn_gate_inp"),
}
WHOLE = {
    "self_attn.sinks": Rule("attn_sinks.weight"),
    "mlp.experts.down_proj": Rule("ffn_down_exps.weight", transposed=True),
    "mlp.experts.down_proj_blocks": Rule("ffn_down_exps.weight"),
    "mlp.experts.down_proj_bias": Rule("ffn_down_exps.bias"),
}
GATE_SLOPE, GATE_LIMIT = 1.702, 7.0


def read(config: Config) -> Mapped:
    """Keys and names."""
    config.require("hidden_act", "silu")
    for name, known in (("swiglu_alpha", GATE_SLOPE), ("swiglu_limit", GATE_LIMIT)):
        if config.number(name, known) != known:
            raise CheckpointError(f"config.json: {name} is {config.values[name]}, but only {known} is computed here")
    keys = rotary(config.rope(), rounds_ramp=False) | {
        "attention.sliding_window": config.count("sliding_window"),
        "attention.sliding_window_pattern": local_layers(config, period=2),
        "expert_count": config.num_experts,
        "expert_used_count": config.count("num_experts_per_tok"),
        "expert_feed_forward_length": config.count("intermediate_size"),
    }
    rules = around() | layers(config, merged(ATTENTION, PARTS)) | in_layers(config, WHOLE)
    shared = {
        "mlp.experts.gate_up_proj": opened("weight", transposed=True),
        "mlp.experts.gate_up_proj_blocks": opened("weight"),
        "mlp.experts.gate_up_proj_bias": opened("bias", axis=-1),
    }
    made = decoder(ARCHITECTURE, config) | prefixed(ARCHITECTURE, keys)
    return Mapped(made, rules, shared=shared_in_layers(config, shared))


def opened(kind: str, *, transposed: bool = False, axis: int = -2) -> tuple[Rule, ...]:
    """Every other row, or value of a bias, is a gate's."""
    return tuple(
        Rule(f"ffn_{part}_exps.{kind}", transposed=transposed, share=slice(first, None, 2), share_axis=axis)
        for first, part in enumerate(("gate", "up"))
    )
