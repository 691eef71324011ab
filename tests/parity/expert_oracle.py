"""The outside oracle for families of experts with attention of their own: transformers over the weights of a GGUF.

`python -m tests.parity.expert_oracle` writes the logits that the ordinary tests compare with. Needs the oracle extra.
transformers has no xing4_0: its oracle is the layers of transformers' DeepSeek V3 between the hyper-connections of its
DeepSeek V4, whose parameters are chosen so that both compute the same.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
SMALL = {"attention.key_length_mla": 20, "attention.value_length_mla": 12, "attention.kv_lora_rank": 24}
SMALL |= {"rope.dimension_count": 8, "attention.key_length": 32, "attention.value_length": 24}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 24}
GROUPS = {"expert_count": 12, "expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 2}


def biases(layers: range, experts: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """What chooses experts beside their scores, in every one of those layers."""
    random = np.random.RandomState(seed)
    return {f"blk.{n}.exp_probs_b.bias": random.uniform(-0.3, 0.3, experts).astype(np.float32) for n in layers}


SPECS: Mapping[str, TinyFamily] = {
    "deepseek_v2_lite": TinyFamily(
        "deepseek2",
        31,
        {"attention.q_lora_rank": None, "expert_gating_func": None, "expert_shared_count": 2},
        tied=False,
    ),
    "deepseek_v2_joined": TinyFamily(
        "deepseek2",
        30,
        {
            "attention.key_length_mla": None,
            "attention.value_length_mla": None,
            "attention.key_length": 32,
            "attention.value_length": 24,
            "attention.head_count_kv": 4,
        },
    ),
    "deepseek_v2_groups": TinyFamily(
        "deepseek2",
        32,
        {**SMALL, **YARN, **GROUPS, "expert_weights_scale": 4.0, "rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    "deepseek_v3_groups": TinyFamily(
        "deepseek2",
        33,
        {
            **YARN,
            **GROUPS,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "block_count": 4,
            "leading_dense_block_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        tensors=biases(range(2, 4), 12, seed=133),
    ),
    "deepseek_yarn_on_angles": TinyFamily("deepseek2", 34, {**YARN, "expert_gating_func": 2}),
    "glm_dsa_shared": TinyFamily(
        "glm-dsa",
        36,
        {
            **SMALL,
            "block_count": 5,
            "attention.indexer.top_k": 5,
            "attention.indexer.key_length": 24,
            "attention.indexer.types": [True, False, True, True, False],
        },
        tensors=biases(range(1, 5), 8, seed=136),
    ),
    "minimax_partial": TinyFamily(
        "minimax-m2",
        37,
        {"rope.dimension_count": 8, "expert_count": 5, "expert_used_count": 3, "attention.head_count_kv": 1},
        tensors=biases(range(2), 5, seed=137),
        tied=False,
    ),
    "mimo2_more_locals": TinyFamily(
        "mimo2",
        38,
        {
            "block_count": 5,
            "attention.head_count_kv": [1, 2, 2, 2, 1],
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": [False, True, True, True, False],
            "rope.freq_base": 1e6,
            "attention.value_scale": 0.5,
        },
        tensors=biases(range(1, 5), 8, seed=138),
    ),
    "xing4_three_streams": TinyFamily(
        "xing4_0",
        35,
        {**SMALL, **YARN, "rope.scaling.yarn_log_multiplier": 0.1, "block_count": 3, "hyper_connection.count": 3},
        tensors=biases(range(1, 3), 8, seed=135),
        tied=False,
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}


def arguments(contents: GGUFContents) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configurations; what one of them does not know it keeps."""
    architecture = contents.keys["general.architecture"]

    def key(name: str, default: Any = None) -> Any:
        return contents.keys.get(f"{architecture}.{name}", default)

    found = {
        "vocab_size": len(contents.tensors["token_embd.weight"]),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "num_hidden_layers": key("block_count") - key("nextn_predict_layers", 0),
        "num_attention_heads": key("attention.head_count"),
        "n_routed_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "n_group": key("expert_group_count", 1),
        "topk_group": key("expert_group_used_count", 1),
        "norm_topk_prob": key("expert_weights_norm", False),
        "routed_scaling_factor": key("expert_weights_scale", 1.0),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    match architecture:
        case "minimax-m2":
            return found | minimax(key)
        case "mimo2":
            return found | mimo(key)
        case _:
            return found | latent(key)


def latent(key: Any) -> dict[str, Any]:
    """Of latent attention, and of an indexer where there is one."""
    rope_dim = key("rope.dimension_count")
    return {
        "num_key_value_heads": key("attention.head_count"),
        "q_lora_rank": key("attention.q_lora_rank"),
        "kv_lora_rank": key("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key("attention.key_length_mla", key("attention.key_length")) - rope_dim,
        "v_head_dim": key("attention.value_length_mla", key("attention.value_length")),
        "n_shared_experts": key("expert_shared_count"),
        "first_k_dense_replace": key("leading_dense_block_count", 0),
        "rope_parameters": rope_parameters(key),
        "index_n_heads": key("attention.indexer.head_count"),
        "index_head_dim": key("attention.indexer.key_length"),
        "index_topk": key("attention.indexer.top_k"),
        "indexer_types": ["full" if own else "shared" for own in key("attention.indexer.types", [])],
    }


def minimax(key: Any) -> dict[str, Any]:
    """Of minimax-m2."""
    rope = {"rope_type": "default", "rope_theta": key("rope.freq_base")}
    head_dim = key("attention.key_length", key("embedding_length") // key("attention.head_count"))
    return {
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": key("expert_feed_forward_length"),
        "num_local_experts": key("expert_count"),
        "rope_parameters": rope | {"partial_rotary_factor": key("rope.dimension_count", head_dim) / head_dim},
    }


def mimo(key: Any) -> dict[str, Any]:
    """Of mimo2, whose local layers have twice the key heads of global ones."""
    pattern, head_dim = key("attention.sliding_window_pattern"), key("attention.key_length")
    factor = {"rope_type": "default", "partial_rotary_factor": (key("rope.dimension_count") + 0.5) / head_dim}
    return {
        "num_key_value_heads": key("attention.head_count_kv")[0],
        "head_dim": head_dim,
        "v_head_dim": key("attention.value_length"),
        "attention_value_scale": key("attention.value_scale"),
        "sliding_window": key("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in pattern],
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(pattern) - 1),
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": factor | {"rope_theta": key("rope.freq_base")},
            "sliding_attention": factor | {"rope_theta": key("rope.freq_base_swa", 10000.0)},
        },
    }


def rope_parameters(key: Any) -> dict[str, Any]:
    """GGUF's rope keys as transformers says them."""
    found: dict[str, Any] = {"rope_type": key("rope.scaling.type", "default"), "rope_theta": key("rope.freq_base")}
    if found["rope_type"] == "yarn":
        found["factor"] = key("rope.scaling.factor")
        found["original_max_position_embeddings"] = key("rope.scaling.original_context_length")
    if key("rope.scaling.yarn_log_multiplier"):
        found["mscale"] = found["mscale_all_dim"] = 10 * key("rope.scaling.yarn_log_multiplier")
    return found


CLASSES = {"glm-dsa": "GlmMoeDsa", "minimax-m2": "MiniMaxM2", "mimo2": "MiMoV2Flash"}


def load_plain(contents: GGUFContents) -> Any:
    """A model of transformers with a GGUF's weights; DeepSeek V2 routes by softmax, V3 by sigmoid."""
    import torch
    import transformers

    given, architecture = arguments(contents), contents.keys["general.architecture"]
    is_v2 = contents.keys.get(f"{architecture}.expert_gating_func", 1) == 1
    name = CLASSES.get(architecture, "DeepseekV2" if is_v2 else "DeepseekV3")
    if name == "DeepseekV2":
        given["topk_method"] = "greedy" if given["n_group"] == 1 else "group_limited_greedy"
    config = getattr(transformers, f"{name}Config")(**given)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    state = {key: torch.from_numpy(np.array(values)) for key, values in state_of(contents.tensors, model).items()}
    outside = set(state) - set(model.state_dict())
    assert not outside, outside
    model.load_state_dict(state, strict=False, assign=True)
    assert {key for key, _ in model.named_parameters()} <= set(state)
    for module in model.modules():  # a file without a bias has none
        if getattr(module, "e_score_correction_bias", torch.empty(0)).is_meta:
            module.e_score_correction_bias = torch.zeros(given["n_routed_experts"])
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.eval()


def state_of(tensors: Mapping[str, npt.NDArray[np.float32]], model: Any) -> dict[str, Any]:
    """A GGUF's tensors under the names of a model of transformers."""
    state: dict[str, Any] = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for layer in range(model.config.num_hidden_layers):
        block, own = f"blk.{layer}.", f"model.layers.{layer}."
        for part, name in NAMES.items():
            for kind in ("weight", "bias"):
                if f"{block}{part}.{kind}" in tensors:
                    state[f"{own}{name}.{kind}"] = tensors[f"{block}{part}.{kind}"]
        if f"{block}attn_sinks.weight" in tensors:
            state[f"{own}self_attn.sinks"] = tensors[f"{block}attn_sinks.weight"]
        if f"{block}attn_k_b.weight" in tensors:
            keys, values = tensors[f"{block}attn_k_b.weight"], tensors[f"{block}attn_v_b.weight"]
            expanded = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
            state[f"{own}self_attn.kv_b_proj.weight"] = expanded.reshape(-1, keys.shape[1])
        if f"{block}ffn_gate_exps.weight" in tensors:
            opened = [tensors[f"{block}ffn_{part}_exps.weight"] for part in ("gate", "up")]
            state[f"{own}mlp.experts.gate_up_proj"] = np.concatenate(opened, axis=1)
            state[f"{own}mlp.experts.down_proj"] = tensors[f"{block}ffn_down_exps.weight"]
        if f"{block}exp_probs_b.bias" in tensors:
            [place] = (key for key in model.state_dict() if key.startswith(own) and "e_score_correction_bias" in key)
            state[place] = tensors[f"{block}exp_probs_b.bias"]
    return state


class Streams:
    """xing4_0: layers of DeepSeek V3 between hyper-connections of DeepSeek V4, called like a model of transformers.

    V4 adds its epsilon to reading shares too, so it is 0 here; xing4_0's 1e-6 in the sums that mixing is divided by is
    far inside the tolerance. V4 mixes with the transpose, xing4_0 with the matrix itself.
    """

    def __init__(self, contents: GGUFContents) -> None:
        self.model = load_plain(contents)
        self.tensors = contents.tensors
        self.num_streams = contents.keys["xing4_0.hyper_connection.count"]
        self.iterations = contents.keys["xing4_0.hyper_connection.sinkhorn_iterations"]

    def connection(self, name: str) -> Any:
        """transformers' module for a sublayer such as `blk.0.hc_attn`."""
        import torch
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

        config = self.model.config
        sizes = {"hc_mult": self.num_streams, "hc_sinkhorn_iters": self.iterations, "hc_eps": 0.0}
        module = DeepseekV4HyperConnection(
            SimpleNamespace(**sizes, rms_norm_eps=config.rms_norm_eps, hidden_size=config.hidden_size)
        )
        state = {part: torch.tensor(self.tensors[f"{name}_{part}.weight"]) for part in ("fn", "base", "scale")}
        module.load_state_dict(state)
        return module

    def __call__(self, input_ids: Any, use_cache: bool) -> Any:
        import torch

        trunk, length = self.model.model, input_ids.shape[1]
        x = trunk.embed_tokens(input_ids)
        named = {
            "position_embeddings": trunk.rotary_emb(x, torch.arange(length)[None]),
            "attention_mask": torch.full((length, length), -torch.inf).triu(1)[None, None],
        }
        streams = x.unsqueeze(2).repeat(1, 1, self.num_streams, 1)
        for number, layer in enumerate(trunk.layers):
            post, comb, read = self.connection(f"blk.{number}.hc_attn")(streams)
            found = layer.self_attn(hidden_states=layer.input_layernorm(read), **named)[0]
            streams = post.unsqueeze(-1) * found.unsqueeze(-2) + comb @ streams
            post, comb, read = self.connection(f"blk.{number}.hc_ffn")(streams)
            made = layer.mlp(layer.post_attention_layernorm(read))
            streams = post.unsqueeze(-1) * made.unsqueeze(-2) + comb @ streams
        return SimpleNamespace(logits=self.model.lm_head(trunk.norm(streams.mean(2))))


def load_model(path: Path) -> Any:
    """The oracle of a checkpoint."""
    contents = GGUFContents.read(path)
    return Streams(contents) if contents.keys["general.architecture"] == "xing4_0" else load_plain(contents)


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 40 tokens that a committed oracle was asked about; past YaRN's original context on purpose."""
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


if __name__ == "__main__":
    write_oracles(ORACLES)
