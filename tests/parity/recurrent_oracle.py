"""The outside oracle for recurrent families, and for gpt-oss: transformers over a GGUF's weights, in float32, eager.

`python -m tests.parity.recurrent_oracle` writes the logits that the ordinary tests compare with. Needs the oracle
extra.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
Array = npt.NDArray[np.float32]
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
UNEVEN = {"ssm.group_count": 3, "ssm.time_step_rank": 6, "ssm.state_size": 12, "ssm.inner_size": 120}


def biases(layers: range, experts: int, seed: int) -> dict[str, Array]:
    """What chooses experts beside their scores, in every one of those layers."""
    random = np.random.RandomState(seed)
    return {f"blk.{n}.exp_probs_b.bias": random.uniform(-0.3, 0.3, experts).astype(np.float32) for n in layers}


SPECS: Mapping[str, TinyFamily] = {
    "qwen35_uneven_heads": TinyFamily(
        "qwen35",
        41,
        {
            **UNEVEN,
            "ssm.conv_kernel": 3,
            "block_count": 5,
            "attention.recurrent_layers": [True, False, True, True, False],
            "full_attention_interval": None,
        },
    ),
    "qwen35moe": TinyFamily("qwen35moe", 42, {"expert_shared_feed_forward_length": 40}, tied=False),
    "qwen3next_uneven_heads": TinyFamily(
        "qwen3next", 43, {**UNEVEN, "full_attention_interval": 2, "expert_weights_norm": False, "expert_used_count": 3}
    ),
    "gpt_oss_three_layers": TinyFamily(
        "gpt-oss",
        44,
        {**YARN, "block_count": 3, "attention.sliding_window": 6, "expert_count": 5, "expert_used_count": 3},
        tied=False,
    ),
    "lfm2_four_taps": TinyFamily(
        "lfm2",
        45,
        {"block_count": 5, "attention.head_count_kv": [0, 4, 0, 4, 4], "shortconv.l_cache": 4},
    ),
    "lfm2moe": TinyFamily("lfm2moe", 46, tensors=biases(range(1, 4), 8, seed=146)),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

CLASSES = {
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
}


def load_model(path: Path) -> Any:
    """A model of transformers with a GGUF's weights."""
    import torch
    import transformers

    contents = GGUFContents.read(path)
    architecture = contents.keys["general.architecture"]
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[architecture])
    config = config_class(**ARGUMENTS[architecture](Keys(architecture, contents)))
    with torch.device("meta"):
        model = model_class(config)
    state: dict[str, Array] = {}
    blocks: dict[int, dict[str, Array]] = {}
    for name, values in contents.tensors.items():
        if name.startswith("blk."):
            _, number, own = name.split(".", 2)
            blocks.setdefault(int(number), {})[own.removesuffix(".weight")] = values
        else:
            state[GLOBAL[name]] = values - PLUS_ONE[architecture] if name == "output_norm.weight" else values
    for number, tensors in blocks.items():
        own_names = LAYERS[architecture](tensors, config)
        state |= {f"model.layers.{number}.{name}": values for name, values in own_names.items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    loaded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    model.load_state_dict(loaded, strict=True, assign=True)
    angles = "pos_emb" if hasattr(model.model, "pos_emb") else "rotary_emb"
    setattr(model.model, angles, type(getattr(model.model, angles))(config))  # its buffers are computed, not loaded
    return model.eval()


GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
PLUS_ONE = {"qwen35": 1.0, "qwen35moe": 1.0, "qwen3next": 1.0, "gpt-oss": 0.0}
"""What is added to norms when they are stored."""


# -- headers ---------------------------------------------------------------------------------------------------------
class Keys:
    """A GGUF's keys without the architecture's name."""

    def __init__(self, architecture: str, contents: GGUFContents) -> None:
        self._prefix, self._keys, self.tensors = architecture, contents.keys, contents.tensors

    def __call__(self, name: str, default: Any = None) -> Any:
        return self._keys.get(f"{self._prefix}.{name}", default)


def decoder(key: Keys) -> dict[str, Any]:
    """What all have."""
    heads, hidden = key("attention.head_count"), key("embedding_length")
    kv_heads = key("attention.head_count_kv")
    return {
        "vocab_size": len(key.tensors["token_embd.weight"]),
        "hidden_size": hidden,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": key("attention.key_length", hidden // heads),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(key("rope.freq_base", 10000.0))},
        "tie_word_embeddings": "output.weight" not in key.tensors,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }


def experts(key: Keys) -> dict[str, Any]:
    """A mixture's sizes."""
    return {
        "num_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "shared_expert_intermediate_size": key("expert_shared_feed_forward_length", key("expert_feed_forward_length")),
        "norm_topk_prob": key("expert_weights_norm", True),
    }


def hybrid(key: Keys) -> dict[str, Any]:
    """A decoder with Gated DeltaNet layers."""
    found, layers = decoder(key), key("block_count")
    kinds = key("attention.recurrent_layers")
    if kinds is None:
        kinds = [bool((layer + 1) % key("full_attention_interval")) for layer in range(layers)]
    found["rope_parameters"]["partial_rotary_factor"] = key("rope.dimension_count") / found["head_dim"]
    if found["intermediate_size"] is None:
        del found["intermediate_size"]
    return found | {
        "layer_types": ["linear_attention" if kind else "full_attention" for kind in kinds],
        "linear_conv_kernel_dim": key("ssm.conv_kernel"),
        "linear_key_head_dim": key("ssm.state_size"),
        "linear_value_head_dim": key("ssm.inner_size") // key("ssm.time_step_rank"),
        "linear_num_key_heads": key("ssm.group_count"),
        "linear_num_value_heads": key("ssm.time_step_rank"),
    }


def gpt_oss(key: Keys) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": float(key("rope.freq_base", 10000.0)),
        "factor": key("rope.scaling.factor"),
        "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return decoder(key) | {
        "intermediate_size": key("expert_feed_forward_length"),
        "num_local_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "sliding_window": key("attention.sliding_window"),
        "rope_parameters": rope,
    }


def lfm2(key: Keys) -> dict[str, Any]:
    found = decoder(key)
    return found | {
        "norm_eps": found.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": key("shortconv.l_cache"),
        "layer_types": ["full_attention" if count else "conv" for count in key("attention.head_count_kv")],
    }


def lfm2moe(key: Keys) -> dict[str, Any]:
    own = {"num_dense_layers": key("leading_dense_block_count"), "use_expert_bias": True, "routed_scaling_factor": 1.0}
    return lfm2(key) | experts(key) | own


ARGUMENTS: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "qwen35": hybrid,
    "qwen35moe": lambda key: hybrid(key) | experts(key),
    "qwen3next": lambda key: hybrid(key) | experts(key),
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
}


# -- tensors ---------------------------------------------------------------------------------------------------------
def hybrid_attention(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """A layer with attention; nothing of it is in another order."""
    found = {f"self_attn.{part}_proj.weight": tensors[f"attn_{part}"] for part in "qkv"}
    found |= {f"self_attn.{part}_norm.weight": tensors[f"attn_{part}_norm"] - 1 for part in "qk"}
    return found | {"self_attn.o_proj.weight": tensors["attn_output"]}


def grouped(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    """A Gated DeltaNet layer with its value heads by key head, from tiled ones."""
    keys, heads, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim

    def by_key_head(values: Array, size: int) -> Array:
        split = values.reshape(heads // keys, keys, size, *values.shape[1:])
        return split.swapaxes(0, 1).reshape(values.shape)

    def mixed(values: Array) -> Array:
        return np.concatenate([values[:first], by_key_head(values[first:], dim)])

    return {
        "attn_qkv": mixed(tensors["attn_qkv"]),
        "ssm_conv1d": mixed(tensors["ssm_conv1d"]),
        "attn_gate": by_key_head(tensors["attn_gate"], dim),
        "ssm_out": by_key_head(tensors["ssm_out"].T, dim).T,
        **{name: by_key_head(tensors[name], 1) for name in ("ssm_a", "ssm_dt.bias", "ssm_alpha", "ssm_beta")},
        "ssm_norm": tensors["ssm_norm"],
    }


def delta_net(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """What the recurrent layers of all have, value heads by key head."""
    return {
        "linear_attn.conv1d.weight": tensors["ssm_conv1d"][:, None],
        "linear_attn.A_log": np.log(-tensors["ssm_a"]),
        "linear_attn.dt_bias": tensors["ssm_dt.bias"],
        "linear_attn.norm.weight": tensors["ssm_norm"],
        "linear_attn.out_proj.weight": tensors["ssm_out"],
    }


def qwen35_layer(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    found = outer_norms(tensors)
    if "attn_q" in tensors:
        found |= hybrid_attention(tensors)
    else:
        own = grouped(tensors, config)
        found |= delta_net(own)
        found["linear_attn.in_proj_qkv.weight"] = own["attn_qkv"]
        found["linear_attn.in_proj_z.weight"] = own["attn_gate"]
        found["linear_attn.in_proj_a.weight"] = own["ssm_alpha"]
        found["linear_attn.in_proj_b.weight"] = own["ssm_beta"]
    return found | feed_forward(tensors)


def qwen3next_layer(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    found = outer_norms(tensors) | feed_forward(tensors)
    if "attn_q" in tensors:
        return found | hybrid_attention(tensors)
    keys, width = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    qkv, z = tensors["attn_qkv"], tensors["attn_gate"]
    parts = [qkv[:width], qkv[width : 2 * width], qkv[2 * width :], z]
    by_key_head = np.concatenate([part.reshape(keys, -1, part.shape[-1]) for part in parts], axis=1)
    found["linear_attn.in_proj_qkvz.weight"] = by_key_head.reshape(-1, qkv.shape[-1])
    found["linear_attn.in_proj_ba.weight"] = tensors["ssm_ba"]
    return found | delta_net(tensors)


def outer_norms(tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {
        "input_layernorm.weight": tensors["attn_norm"] - 1,
        "post_attention_layernorm.weight": tensors["post_attention_norm"] - 1,
    }


def feed_forward(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """One feed-forward, or experts with a shared one."""
    if "ffn_gate" in tensors:
        return {f"mlp.{part}_proj.weight": tensors[f"ffn_{part}"] for part in ("gate", "up", "down")}
    found = {f"mlp.shared_expert.{part}_proj.weight": tensors[f"ffn_{part}_shexp"] for part in ("gate", "up", "down")}
    return found | {
        "mlp.shared_expert_gate.weight": tensors["ffn_gate_inp_shexp"],
        "mlp.gate.weight": tensors["ffn_gate_inp"],
        "mlp.experts.gate_up_proj": np.concatenate([tensors["ffn_gate_exps"], tensors["ffn_up_exps"]], axis=1),
        "mlp.experts.down_proj": tensors["ffn_down_exps"],
    }


def gpt_oss_layer(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    found = {"input_layernorm.weight": tensors["attn_norm"]}
    found["post_attention_layernorm.weight"] = tensors["post_attention_norm"]
    found["self_attn.sinks"] = tensors["attn_sinks"]
    for part, own in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
        found[f"self_attn.{part}_proj.weight"] = tensors[own]
        found[f"self_attn.{part}_proj.bias"] = tensors[f"{own}.bias"]
    found["mlp.router.weight"], found["mlp.router.bias"] = tensors["ffn_gate_inp"], tensors["ffn_gate_inp.bias"]
    opened = [tensors[f"ffn_{part}_exps"].swapaxes(1, 2) for part in ("gate", "up")]
    found["mlp.experts.gate_up_proj"] = np.stack(opened, -1).reshape(*opened[0].shape[:2], -1)
    opened_biases = [tensors[f"ffn_{part}_exps.bias"] for part in ("gate", "up")]
    found["mlp.experts.gate_up_proj_bias"] = np.stack(opened_biases, -1).reshape(len(opened_biases[0]), -1)
    found["mlp.experts.down_proj"] = tensors["ffn_down_exps"].swapaxes(1, 2)
    found["mlp.experts.down_proj_bias"] = tensors["ffn_down_exps.bias"]
    return found


def lfm2_layer(tensors: Mapping[str, Array], config: Any) -> dict[str, Array]:
    found = {"operator_norm.weight": tensors["attn_norm"], "ffn_norm.weight": tensors["ffn_norm"]}
    if "attn_q" in tensors:
        found |= {f"self_attn.{part}_proj.weight": tensors[f"attn_{part}"] for part in "qkv"}
        found |= {f"self_attn.{part}_layernorm.weight": tensors[f"attn_{part}_norm"] for part in "qk"}
        found["self_attn.out_proj.weight"] = tensors["attn_output"]
    else:
        found["conv.conv.weight"] = tensors["shortconv.conv"][:, None]
        found |= {f"conv.{part}.weight": tensors[f"shortconv.{part}"] for part in ("in_proj", "out_proj")}
    if "ffn_gate" in tensors:
        names = {"gate": "w1", "up": "w3", "down": "w2"}
        return found | {f"feed_forward.{own}.weight": tensors[f"ffn_{part}"] for part, own in names.items()}
    return found | {
        "feed_forward.gate.weight": tensors["ffn_gate_inp"],
        "feed_forward.expert_bias": tensors["exp_probs_b.bias"],
        "feed_forward.experts.gate_up_proj": np.concatenate([tensors["ffn_gate_exps"], tensors["ffn_up_exps"]], 1),
        "feed_forward.experts.down_proj": tensors["ffn_down_exps"],
    }


LAYERS: Mapping[str, Callable[[Mapping[str, Array], Any], dict[str, Array]]] = {
    "qwen35": qwen35_layer,
    "qwen35moe": qwen35_layer,
    "qwen3next": qwen3next_layer,
    "gpt-oss": gpt_oss_layer,
    "lfm2": lfm2_layer,
    "lfm2moe": lfm2_layer,
}


# -- writing ---------------------------------------------------------------------------------------------------------
def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 40 tokens that a committed oracle was asked about."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 40)


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            path = write_family(Path(work) / f"{name}.gguf", spec)
            ids = oracle_ids(name)
            np.savez_compressed(folder / f"{name}.npz", input_ids=ids, logits=logits(load_model(path), ids))
            print(f"{name}.npz")


def write_folded_oracles(folder: Path) -> None:
    """The same for what a folded checkpoint stands for."""
    import tempfile

    from tests.parity.folded import QUANT_TYPES, SPEC, write_unfolded

    ids = np.random.RandomState(SPEC.seed + 1000).randint(0, 512, 40)
    with tempfile.TemporaryDirectory() as work:
        for quant_type in QUANT_TYPES:
            model = load_model(write_unfolded(Path(work) / f"{quant_type}.gguf", quant_type))
            np.savez_compressed(folder / f"folded_{quant_type}.npz", input_ids=ids, logits=logits(model, ids))
            print(f"folded_{quant_type}.npz")


if __name__ == "__main__":
    write_oracles(ORACLES)
    write_folded_oracles(ORACLES)
