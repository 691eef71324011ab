"""The outside oracle for every plain family: transformers over the weights of a GGUF, in float32, eager.

`python -m tests.parity.transformers_families [NAME …]` writes the logits that the ordinary tests compare with, of all
SPECS and of Gemma 3 270M or of those that are named; with --checkpoint their checkpoints too, which every test of all
families then takes. Needs the oracle extra.
"""

import argparse
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.compare import log_softmax
from tests.parity.oracle_files import ORACLES, keep_oracle
from tests.parity.tiny_families import TinyFamily, write_family
from tests.parity.transformers_oracle import GGUFContents, in_transformers_order, load_llama, logits

LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
SPECS: Mapping[str, TinyFamily] = {
    "qwen2_yarn_untied": TinyFamily("qwen2", 21, {**YARN, "attention.head_count_kv": 1}, tied=False),
    "qwen3_wide_heads": TinyFamily("qwen3", 22, {"attention.key_length": 24, "attention.value_length": 24}),
    "gemma2_27b": TinyFamily(
        "gemma2",
        23,
        {
            "block_count": 46,
            "embedding_length": 32,
            "feed_forward_length": 24,
            "attention.sliding_window": 9,
            "attention.key_length": 12,
            "attention.value_length": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_4b": TinyFamily(
        "gemma3",
        24,
        {**LINEAR, "block_count": 7, "attention.sliding_window": 11, "rope.freq_base": 1e6, "rope.freq_base_swa": 5e3},
    ),
    "gemma3_27b": TinyFamily(
        "gemma3",
        25,
        {
            "block_count": 62,
            "embedding_length": 32,
            "feed_forward_length": 24,
            "attention.sliding_window": 5,
            "attention.key_length": 12,
            "attention.value_length": 12,
            "rope.freq_base": 1e6,
        },
    ),
    "gemma3_pattern": TinyFamily(
        "gemma3",
        26,
        {
            "block_count": 4,
            "attention.sliding_window": 6,
            "rope.freq_base": 1e6,
            "attention.sliding_window_pattern": [False, True, False, True],
        },
        tied=False,
    ),
    "gemma3_scale_cap": TinyFamily(
        "gemma3", 19, {"attention.sliding_window": 7, "attention.scale": 0.125, "final_logit_softcapping": 2.0}
    ),
    "qwen3moe_three_of_five": TinyFamily(
        "qwen3moe",
        29,
        {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 24, "expert_weights_norm": False},
    ),
    "smollm3": TinyFamily("smollm3", 28, {"block_count": 5}),
    "olmo2_one_key_head": TinyFamily("olmo2", 27, {"attention.head_count_kv": 1, "rope.freq_base": 5e5}),
    "olmo3": TinyFamily(
        "olmo2",
        20,
        {
            **YARN,
            "rope.scaling.yarn_attn_factor": 1.5,
            "block_count": 5,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [True, True, False, True, False],
        },
    ),
}
"""Checkpoints whose logits are committed as oracles/<name>.npz."""

CLASSES = {
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
}
SIZE_OF_27B = {"gemma2": 46, "gemma3": 62}


def load_model(path: Path) -> Any:
    """A model of transformers with a GGUF's weights."""
    import torch
    import transformers

    contents = GGUFContents.read(path)
    architecture = contents.keys["general.architecture"]
    if architecture == "llama":
        return load_llama(path)
    kind = "olmo3" if "olmo2.attention.sliding_window" in contents.keys else architecture
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[kind])
    config = config_class(**arguments(architecture, contents))
    with torch.device("meta"):
        model = model_class(config)
    state = {}
    for name, values in contents.tensors.items():
        if architecture.startswith("gemma") and "norm" in name:
            values = values - 1  # stored with it
        if architecture == "smollm3" and name.startswith("blk."):
            values = in_transformers_order(name, values, config.num_attention_heads, config.num_key_value_heads)
        state[hf_name(architecture, name)] = torch.from_numpy(np.array(values))
    for layer in range(config.num_hidden_layers if architecture == "qwen3moe" else 0):
        block = f"model.layers.{layer}.mlp.experts."
        opened = [state.pop(f"{block}{part}.weight") for part in ("gate_proj", "up_proj")]
        state[f"{block}gate_up_proj"] = torch.cat(opened, dim=1)
        state[f"{block}down_proj"] = state.pop(f"{block}down_proj.weight")
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=False, assign=True)
    assert {name for name, _ in model.named_parameters()} <= set(state)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def arguments(architecture: str, contents: GGUFContents) -> dict[str, Any]:
    """A GGUF header as the arguments of transformers' configuration."""

    def key(name: str, default: Any = None) -> Any:
        return contents.keys.get(f"{architecture}.{name}", default)

    heads, hidden, layers = key("attention.head_count"), key("embedding_length"), key("block_count")
    head_dim = key("attention.key_length", hidden // heads)
    found = {
        "vocab_size": len(contents.tensors["token_embd.weight"]),
        "hidden_size": hidden,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(key),
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    if architecture == "qwen3moe":
        return found | {
            "num_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
            "moe_intermediate_size": key("expert_feed_forward_length"),
            "norm_topk_prob": key("expert_weights_norm", True),
        }
    if key("attention.sliding_window") is None:
        return found
    period = {"gemma2": 2, "gemma3": 6, "olmo2": 4}[architecture]
    pattern = key("attention.sliding_window_pattern", [bool((layer + 1) % period) for layer in range(layers)])
    found |= {
        "query_pre_attn_scalar": hidden // heads if layers == SIZE_OF_27B.get(architecture) else head_dim,
        "sliding_window": key("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in pattern],
        "attn_logit_softcapping": key("attn_logit_softcapping"),
        "final_logit_softcapping": key("final_logit_softcapping"),
    }
    if key("attention.scale") is not None:
        found["query_pre_attn_scalar"] = round(key("attention.scale") ** -2)
    if architecture != "gemma2":
        local = {"rope_type": "default", "rope_theta": key("rope.freq_base_swa", 10000.0)}
        found["rope_parameters"] = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    return found


def rope_parameters(key: Any) -> dict[str, Any]:
    """GGUF's rope keys as transformers says them."""
    found = {"rope_type": key("rope.scaling.type", "default"), "rope_theta": float(key("rope.freq_base", 10000.0))}
    if found["rope_type"] != "default":
        found["factor"] = key("rope.scaling.factor")
    if found["rope_type"] == "yarn":
        found["original_max_position_embeddings"] = key("rope.scaling.original_context_length")
        found["attention_factor"] = key("rope.scaling.yarn_attn_factor")
    return found


def hf_name(architecture: str, name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    if not block:
        return f"{NAMES[part]}.{kind}"
    if part == "ffn_norm":  # where it stands says what transformers calls it
        own = "pre_feedforward_layernorm" if architecture.startswith("gemma") else "post_attention_layernorm"
    else:
        own = NAMES[part]
    return f"model.layers.{block[1]}.{own}.{kind}"


def oracle_ids(name: str) -> npt.NDArray[np.int64]:
    """The 24 tokens that a committed oracle was asked about."""
    return np.random.RandomState(SPECS[name].seed + 1000).randint(0, 512, 24)


def write_oracle(name: str, folder: Path) -> None:
    """Make a checkpoint, ask transformers, keep ids and logits."""
    with tempfile.TemporaryDirectory() as work:
        path = write_family(Path(work) / f"{name}.gguf", SPECS[name])
        ids = oracle_ids(name)
        np.savez_compressed(folder / f"{name}.npz", input_ids=ids, logits=logits(load_model(path), ids))
    print(f"{name}.npz")


def keep_checkpoint(name: str) -> None:
    """Keep the checkpoint beside its logits."""
    made_by = ("transformers", version("transformers"))
    keep_oracle(name, SPECS[name], lambda path, ids: logits(load_model(path), np.array(ids)), made_by)


def write_gemma3(folder: Path) -> None:
    """Gemma 3 270M on a page of real text: the five likeliest tokens at every fourth of 512 positions, and the NLL."""
    from pocketllm.engine.text.tokenizer import Tokenizer
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from tests.parity.record import TEXT, nll

    path = resolve_model("gemma3-270m", print)
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:512], np.int64)
    theirs = logits(load_model(path), ids)
    logprobs = log_softmax(theirs[::4])
    top_ids = np.argsort(-logprobs, axis=-1)[:, :5]
    top_logprobs = np.take_along_axis(logprobs, top_ids, axis=-1)
    np.savez_compressed(
        folder / "gemma3_270m_top5.npz",
        input_ids=ids,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        nll=nll(theirs, ids),
    )
    print("gemma3_270m_top5.npz")


def main() -> None:
    """Write what is named, else everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of SPECS")
    parser.add_argument("--checkpoint", action="store_true", help="keep the checkpoints that are named, too")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in SPECS]:
        parser.error(f"not in SPECS: {', '.join(unknown)}")
    if given.checkpoint and not given.names:
        parser.error("--checkpoint: say of which")
    for name in given.names or SPECS:
        if given.checkpoint:
            keep_checkpoint(name)
        else:
            write_oracle(name, ORACLES)
    if not given.names:
        write_gemma3(ORACLES)


if __name__ == "__main__":
    main()
