"""The outside oracle for glm5-next: transformers over a GGUF's weights, in float32, eager.

`python -m tests.parity.glm5_next_oracle` writes the logits that ordinary tests compare with. Needs the oracle extra.
transformers has the text decoder without a head, which is put on it here.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.recurrent_oracle import Keys
from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, logits

ORACLES = Path(__file__).parents[1] / "oracles"
Array = npt.NDArray[np.float32]


def biases(layers: range, experts: int, seed: int) -> dict[str, Array]:
    """What chooses experts beside their scores, large enough to change the choice."""
    random = np.random.RandomState(seed)
    return {f"blk.{n}.exp_probs_b.bias": random.uniform(-0.3, 0.3, experts).astype(np.float32) for n in layers}


SPECS: Mapping[str, TinyFamily] = {
    "glm5_next": TinyFamily("glm5-next", 71, tensors=biases(range(1, 4), 8, seed=171), tied=False),
    "glm5_next_tight_limits": TinyFamily(
        "glm5-next",
        72,
        {
            "block_count": 6,
            "attention.head_count": 3,
            "attention.head_count_kv": [1, 0, 0, 1, 1, 0],
            "attention.key_length_mla": 20,
            "attention.value_length_mla": 28,
            "attention.indexer.head_count": 18,
            "attention.indexer.key_length": 12,
            "attention.indexer.top_k": 9,
            "attention.indexer.kpool": 3,
            "kda.head_dim": 12,
            "kda.gate_lower_bound": -1.5,
            "ssm.conv_kernel": 3,
            "leading_dense_block_count": 2,
            "expert_used_count": 3,
            "expert_shared_count": 2,
            "expert_weights_norm": False,
            "expert_weights_scale": 1.5,
            "swiglu_clamp_exp": 0.2,
            "swiglu_clamp_shexp": None,
            "hyper_connection.count": 3,
            "hyper_connection.sinkhorn_iterations": 4,
            "hyper_connection.epsilon": 1e-2,
        },
        tensors=biases(range(2, 6), 8, seed=172),
    ),
    "glm5_next_unbounded": TinyFamily(
        "glm5-next",
        73,
        {
            "block_count": 3,
            "attention.head_count_kv": [0, 1, 1],
            "attention.indexer.types": [False, True, False],
            "kda.gate_lower_bound": None,
            "leading_dense_block_count": 0,
        },
        tensors=biases(range(3), 8, seed=173),
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

GLOBAL = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{
        f"hc_{own}_{part}.weight": f"{half}.{part}"
        for own, half in (("attn", "attn_hc"), ("ffn", "ffn_hc"))
        for part in ("fn", "base", "scale")
    },
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    "attn_output.weight": "self_attn.o_proj.weight",
    "ssm_f_a.weight": "self_attn.forget_gate.f_a_proj.weight",
    "ssm_f_b.weight": "self_attn.forget_gate.f_b_proj.weight",
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_beta.weight": "self_attn.b_proj.weight",
    "ssm_g_a.weight": "self_attn.g_a_proj.weight",
    "ssm_g_b.weight": "self_attn.g_b_proj.weight",
    "ssm_norm.weight": "self_attn.o_norm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
    "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def layer_state(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """A layer's tensors under transformers' names, which keeps some of them together."""
    state = {LAYER[name]: values for name, values in tensors.items() if name in LAYER}
    if "ssm_a" in tensors:
        state["self_attn.forget_gate.A_log"] = np.log(-tensors["ssm_a"])
        kernels = [tensors[f"ssm_conv1d_{part}.weight"] for part in "qkv"]
        state["self_attn.conv1d.weight"] = np.concatenate([k.reshape(-1, 1, k.shape[-1]) for k in kernels])
    else:
        keys, values = tensors["attn_k_b.weight"], tensors["attn_v_b.weight"]
        expanded = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        state["self_attn.kv_b_proj.weight"] = expanded.reshape(-1, keys.shape[1])
    if "ffn_gate_exps.weight" in tensors:
        opened = [tensors[f"ffn_{part}_exps.weight"] for part in ("gate", "up")]
        state["mlp.experts.gate_up_proj"] = np.concatenate(opened, axis=1)
    return state


class WithHead:
    """transformers' decoder and a head, called like one of its models for causal language."""

    def __init__(self, decoder: Any, head: Any) -> None:
        self.decoder, self.head = decoder, head

    def __call__(self, input_ids: Any, use_cache: bool) -> Any:
        hidden = self.decoder(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=hidden @ self.head.T)


def load_model(path: Path) -> WithHead:
    """A model of transformers with a GGUF's weights."""
    import torch
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    contents = GGUFContents.read(path)
    decoder = Glm5NextTextModel(Glm5NextTextConfig(**arguments(Keys("glm5-next", contents))))
    state = {GLOBAL[name]: values for name, values in contents.tensors.items() if name in GLOBAL}
    for number in range(decoder.config.num_hidden_layers):
        block = f"blk.{number}."
        own = {name.removeprefix(block): v for name, v in contents.tensors.items() if name.startswith(block)}
        state |= {f"layers.{number}.{name}": values for name, values in layer_state(own).items()}
    loaded = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    decoder.load_state_dict(loaded, strict=True)
    head = contents.tensors.get("output.weight", contents.tensors["token_embd.weight"])
    return WithHead(decoder.eval(), torch.from_numpy(np.array(head)))


def arguments(key: Keys) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configuration."""
    kinds, dense = key("attention.head_count_kv"), key("leading_dense_block_count")
    limits = key("swiglu_clamp_exp")
    types = key("attention.indexer.types", [True] * len(kinds))
    return {
        "vocab_size": 512,
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count"),
        "n_shared_experts": key("expert_shared_count"),
        "n_routed_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "routed_scaling_factor": key("expert_weights_scale"),
        "norm_topk_prob": key("expert_weights_norm"),
        "q_lora_rank": key("attention.q_lora_rank"),
        "kv_lora_rank": key("attention.kv_lora_rank"),
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": key("attention.key_length_mla"),
        "v_head_dim": key("attention.value_length_mla"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "pad_token_id": 0,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(kinds) - dense),
        "layer_types": ["indexed_attention" if kind else "linear_attention" for kind in kinds],
        "indexer_types": ["full" if kind else "shared" for kind in types],
        "index_topk": key("attention.indexer.top_k"),
        "index_head_dim": key("attention.indexer.key_length"),
        "index_n_heads": key("attention.indexer.head_count"),
        "index_kpool": key("attention.indexer.kpool"),
        "index_kpool_always_select_tail": key("attention.indexer.kpool_select_tail"),
        "swiglu_limit": limits[0] if isinstance(limits, list) else limits,
        "linear_head_dim": key("kda.head_dim"),
        "linear_num_heads": key("attention.head_count"),
        "linear_conv_kernel_dim": key("ssm.conv_kernel"),
        "linear_lower_bound": key("kda.gate_lower_bound"),
        "hc_mult": key("hyper_connection.count"),
        "hc_eps": key("hyper_connection.epsilon"),
        "hc_sinkhorn_iters": key("hyper_connection.sinkhorn_iterations"),
        "attn_implementation": "eager",
    }


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 72 tokens that a committed oracle was asked about; past a chunk of 64 of transformers' recurrence."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 72)


def write_oracles(folder: Path) -> None:
    """Make each checkpoint, ask transformers, keep ids and logits."""
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        for name, spec in SPECS.items():
            ids = oracle_ids(name)
            model = load_model(write_family(Path(work) / f"{name}.gguf", spec))
            np.savez_compressed(folder / f"{name}.npz", input_ids=ids, logits=logits(model, ids))
            print(f"{name}.npz")


if __name__ == "__main__":
    write_oracles(ORACLES)
