"""Recurrent families, gpt-oss and gemma4 read headers that are as they should be, and say what is wrong with others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.contract import CompressedSpec, KVSpec, LatentSpec, SeveralCaches, StateSpec
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import make_plan
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import GGUFError, UnsupportedFeatureError
from tests.parity.tiny_families import TinyFamily, write_family
from tests.unit.test_plan import CAPABILITY


def reasons(path: Path, architecture: str, **spoiled: Any) -> list[str]:
    """Why a tiny checkpoint with some keys spoiled does not run."""
    keys = {name.replace("__", "."): value for name, value in spoiled.items()}
    with open_checkpoint(write_family(path / "x.gguf", TinyFamily(architecture, spoiled=keys))) as checkpoint:
        return list(find_family(architecture).unmet(checkpoint))


FAMILIES = ("qwen35", "qwen35moe", "qwen3next", "gpt-oss", "lfm2", "lfm2moe", "gemma4", "qwen4exp", "deepseek4")
FAMILIES += ("glm5-next",)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_checkpoint_as_it_should_be_misses_nothing(architecture: str, tmp_path: Path) -> None:
    assert reasons(tmp_path, architecture) == []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_for_something_that_is_not_there_is_a_reason(architecture: str, tmp_path: Path) -> None:
    [reason] = reasons(tmp_path, architecture, attention__clamp_kqv=8.0)

    assert reason == f"{architecture}.attention.clamp_kqv=8.0 is not supported by family {architecture}"


# -- caches
HYBRID = SeveralCaches((KVSpec(1, 2, 16, 16), StateSpec(3, (3, 128), (4, 16, 16))))
CACHES = {
    "qwen35": HYBRID,
    "qwen35moe": HYBRID,
    "qwen3next": HYBRID,
    "gpt-oss": SeveralCaches((KVSpec(1, 2, 16, 16), KVSpec(1, 2, 16, 16, window=8))),
    "lfm2": SeveralCaches((KVSpec(1, 2, 16, 16), StateSpec(3, (2, 64)))),
    "lfm2moe": SeveralCaches((KVSpec(1, 2, 16, 16), StateSpec(3, (2, 64)))),
    "gemma4": SeveralCaches((KVSpec(2, 2, 16, 16, window=8), KVSpec(2, 2, 32, 32))),
    "qwen4exp": SeveralCaches(
        (*HYBRID.parts[:1], LatentSpec(1, 16), *HYBRID.parts[1:], StateSpec(1, (9, 256)), StateSpec(1, (2, 1)))
    ),
    "glm5-next": SeveralCaches(
        (
            *(LatentSpec(2, 32), CompressedSpec(2, 16, 4), StateSpec(2, (3, 32))),
            *(StateSpec(2, (3, 64), (4, 16, 16)), StateSpec(2, (3, 64)), StateSpec(2, (3, 64))),
        )
    ),
    "deepseek4": SeveralCaches(
        (
            *(CompressedSpec(2, 32, 4), CompressedSpec(2, 16, 4), CompressedSpec(1, 32, 8)),
            *(StateSpec(4, (7, 32)), StateSpec(2, (7, 128)), StateSpec(2, (7, 64)), StateSpec(1, (7, 64))),
        )
    ),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_cache_is_told_by_the_header(architecture: str) -> None:
    assert find_family(architecture).kv_spec(TinyFamily(architecture).metadata()) == CACHES[architecture]


def test_the_published_model_takes_the_bytes_that_are_known_of_it() -> None:
    """Qwen3.5-27B: 64 KiB a token in float16, and in each of 48 layers a matrix for each of 48 heads."""
    qwen = TinyFamily(
        "qwen35",
        keys={
            "block_count": 64,
            "embedding_length": 5120,
            "feed_forward_length": 17408,
            "attention.head_count": 24,
            "attention.head_count_kv": 4,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.dimension_count": 64,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 48,
            "ssm.inner_size": 6144,
        },
    ).metadata()
    spec = find_family("qwen35").kv_spec(qwen)

    assert spec.bytes_per_token(2) == 64 << 10
    assert spec.bytes_per_sequence() == 48 * 4 * (3 * 10240 + 48 * 128 * 128)


def test_a_plan_counts_a_state_for_each_request_and_as_many_for_snapshots(tmp_path: Path) -> None:
    state = HYBRID.bytes_per_sequence()
    ops = find_family("qwen35").capability.required_ops | CAPABILITY.ops
    capability = replace(CAPABILITY, ops=ops)
    with open_checkpoint(write_family(tmp_path / "x.gguf", TinyFamily("qwen35"))) as checkpoint:
        plans = [
            make_plan(
                EngineOptions(model="x", max_num_seqs=3, prefix_cache=wanted),
                find_family("qwen35"),
                capability,
                checkpoint,
            )
            for wanted in (True, False)
        ]

    assert [plan.limits.num_state_slots for plan in plans] == [6, 3]
    assert [plan.state_bytes for plan in plans] == [6 * state, 3 * state]


def test_a_plan_counts_the_logits_of_prompts_ends_where_they_are_kept(tmp_path: Path) -> None:
    ops = find_family("qwen35").capability.required_ops | CAPABILITY.ops
    options = EngineOptions(model="x", max_num_seqs=3)
    with open_checkpoint(write_family(tmp_path / "x.gguf", TinyFamily("qwen35"))) as checkpoint:
        without, kept = (
            make_plan(options, find_family("qwen35"), replace(CAPABILITY, ops=having), checkpoint)
            for having in (ops - {"copy_blocks"}, ops | {"copy_blocks"})
        )
        vocab = checkpoint.tensors["token_embd.weight"].shape[0]

    assert (without.limits.keeps_prompt_ends, kept.limits.keeps_prompt_ends) == (False, True)
    assert kept.state_bytes - without.state_bytes == 3 * vocab * 4


# -- what is refused
PATTERN = "it must say true or false for each layer"
BAD: list[tuple[str, str, Any, str]] = [
    ("qwen35", "attention__recurrent_layers", [True, False], f"is [True, False]: {PATTERN}"),
    ("qwen35", "full_attention_interval", 9, "all 4 layers of the qwen35 are recurrent: one must not be"),
    ("qwen35", "full_attention_interval", 0, "qwen35.full_attention_interval is 0: it must be a whole number above 0"),
    ("qwen35", "ssm__inner_size", 66, "metadata key qwen35.ssm.inner_size is 66: it must divide by 4"),
    ("qwen35", "ssm__group_count", 3, "metadata key qwen35.ssm.time_step_rank is 4: it must divide by 3"),
    ("qwen35", "ssm__conv_kernel", 5, "ssm_conv1d.weight has shape (128, 4), expected (128, 5)"),
    ("qwen35", "nextn_predict_layers", 4, "qwen35.nextn_predict_layers=4 leaves none of the layers"),
    ("qwen3next", "expert_used_count", 9, "qwen3next.expert_used_count is 9: there are only 8 experts"),
    ("qwen35moe", "expert_gating_func", 2, "qwen35moe.expert_gating_func=2 is not supported by family qwen35moe"),
    ("gpt-oss", "expert_used_count", 9, "gpt-oss.expert_used_count is 9: there are only 8 experts"),
    ("lfm2", "attention__head_count_kv", [0, 1, 2, 0], "it must give each layer's key heads, 0 for a convolution"),
    ("lfm2", "attention__head_count_kv", [0, 0, 0, 0], "it must give each layer's key heads, 0 for a convolution"),
    ("lfm2", "attention__head_count_kv", [0, 0, 2], "lfm2.attention.head_count_kv has 3 entries for 4 layers"),
    ("lfm2", "shortconv__l_cache", 0, "lfm2.shortconv.l_cache is 0: it must be a whole number above 0"),
    ("lfm2moe", "expert_gating_func", 7, "lfm2moe.expert_gating_func is 7: it must be 1 for softmax or 2 for sigmoid"),
    (
        "qwen4exp",
        "attention__indexer__top_k",
        15,
        "attention.indexer.top_k is 15: it must be whole groups of 4",
    ),
    ("qwen4exp", "attention__compress_ratios", [4, 0, 0, 4], "it must be one number for all layers with attention"),
    ("qwen4exp", "ple__layers", [0, 1], "qwen4exp.ple.layers is [0, 1]: n-grams of one layer are supported"),
    ("qwen4exp", "ple__head_offsets", [0, 61], "qwen4exp.ple.head_offsets is [0, 61]: it must be 4 whole numbers"),
    ("deepseek4", "attention__compress_ratios", [0, 4, 8], "is [0, 4, 8]: it must give each layer 0, 4 or one number"),
    ("deepseek4", "attention__compress_ratios", [0, 4, 8, 16], "it must give each layer 0, 4 or one number above 1"),
    (
        "deepseek4",
        "attention__compress_ratios",
        [0, 4, 8, 0],
        "tensors the family does not know: blk.3.attn_compressor",
    ),
    ("deepseek4", "attention__head_count_kv", 2, "deepseek4.attention.head_count_kv is 2: it must be 1"),
    ("deepseek4", "attention__sliding_window", 1, "deepseek4.attention.sliding_window is 1: it must be above 1"),
    ("deepseek4", "attention__output_group_count", 3, "4 heads (deepseek4.attention.head_count) cannot form 3 equal"),
    ("deepseek4", "attention__indexer__key_length", 8, "indexer.key_length=8 must be at least rope.dimension_count=16"),
    ("deepseek4", "expert_gating_func", 2, "deepseek4.expert_gating_func is 2: it must be 4, the root of a softplus"),
    ("deepseek4", "expert_used_count", 9, "deepseek4.expert_used_count is 9: there are only 8 experts"),
    ("deepseek4", "swiglu_clamp_exp", [10.0], "deepseek4.swiglu_clamp_exp is [10.0]: it must be a number above 0 for"),
    ("deepseek4", "hash_layer_count", 2, "missing tensors: blk.1.ffn_gate_tid2eid.weight"),
    ("glm5-next", "attention__head_count_kv", [0, 0, 0, 0], "it must be 1 for each layer with attention, 0 for the"),
    ("glm5-next", "attention__head_count_kv", [0, 2, 0, 2], "it must be 1 for each layer with attention, 0 for the"),
    ("glm5-next", "attention__head_count_kv", [1, 0], "glm5-next.attention.head_count_kv is [1, 0]: it must be 1 for"),
    ("glm5-next", "attention__key_length", 48, "attention.key_length is 48: without rotation it must be the rank 32"),
    ("glm5-next", "attention__indexer__kpool", 3, "attention.indexer.kpool is 3: it must be above 1 and divide the 16"),
    ("glm5-next", "attention__indexer__kpool_select_tail", False, "kpool_select_tail=False is not supported by family"),
    ("glm5-next", "attention__indexer__types", [True, False, True, True], "and true for the first with attention"),
    ("glm5-next", "rope__dimension_count", 16, "glm5-next.rope.dimension_count=16 is not supported by family"),
    ("glm5-next", "kda__gate_lower_bound", 5.0, "kda.gate_lower_bound is 5.0: it must be a number below 0"),
    ("glm5-next", "expert_gating_func", 4, "glm5-next.expert_gating_func is 4: it must be 2, sigmoid"),
    ("glm5-next", "expert_group_count", 2, "glm5-next.expert_group_count=2 is not supported by family glm5-next"),
    ("glm5-next", "swiglu_clamp_exp", [10.0, -1.0, 1.0, 1.0], "swiglu_clamp_exp is [10.0, -1.0, 1.0, 1.0]: it must be"),
    ("glm5-next", "ssm__conv_kernel", 5, "ssm_conv1d_q.weight has shape (1, 64, 1, 4), expected (1, 64, 1, 5)"),
    ("glm5-next", "leading_dense_block_count", 2, "missing tensors: blk.1.ffn_gate.weight"),
    ("gemma4", "attention__head_count_kv", [2, 2, 4, 2], "is [2, 2, 4, 2]: layers of a kind must have one"),
    ("gemma4", "attention__shared_kv_layers", 3, "a layer shares keys that none has"),
    ("gemma4", "feed_forward_length", [96, 96], "is [96, 96]: it must be a whole number above 0 for each layer"),
    ("gemma4", "expert_count", 8, "metadata key gemma4.expert_used_count is absent: it must be a whole number above 0"),
    ("gemma4", "expert_gating_func", 2, "gemma4.expert_gating_func=2 is not supported by family gemma4"),
]


@pytest.mark.parametrize(("architecture", "key", "value", "reason"), BAD)
def test_a_header_that_cannot_be_followed_is_a_reason(
    architecture: str, key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    assert any(reason in found for found in reasons(tmp_path, architecture, **{key: value}))


ROUTES = "blk.0.ffn_gate_tid2eid.weight"


def test_a_table_of_experts_that_is_no_table_of_whole_numbers_is_a_reason(tmp_path: Path) -> None:
    floats = TinyFamily("deepseek4", tensors={ROUTES: np.zeros((512, 2), np.float32)})
    with open_checkpoint(write_family(tmp_path / "x.gguf", floats)) as checkpoint:
        [reason] = find_family("deepseek4").unmet(checkpoint)

    assert reason == f"tensor {ROUTES} is of type F32, and must be I32: it names experts"


def test_a_table_that_names_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    beyond: Any = np.full((512, 2), 8, np.int32)
    path = write_family(tmp_path / "x.gguf", TinyFamily("deepseek4", tensors={ROUTES: beyond}))
    ops = select_backend("reference").ops
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(GGUFError, match=f"{ROUTES} names experts 8 to 8, and there are 8 from 0 on"),
    ):
        find_family("deepseek4").load(checkpoint, ops, 64)


def test_whole_numbers_are_read_only_where_a_family_says_so(tmp_path: Path) -> None:
    numbers: Any = np.zeros((128, 64), np.int32)
    path = write_family(tmp_path / "x.gguf", TinyFamily("deepseek4", tensors={"blk.0.attn_q_a.weight": numbers}))
    capability = replace(CAPABILITY, ops=find_family("deepseek4").capability.required_ops)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(UnsupportedFeatureError) as refused,
    ):
        make_plan(EngineOptions(model="x"), find_family("deepseek4"), capability, checkpoint)

    assert any(
        "cannot decode quant type I32 (1 tensors, such as blk.0.attn_q_a.weight)" in r for r in refused.value.reasons
    )


@pytest.mark.parametrize(
    ("architecture", "keys", "op"),
    [
        ("glm5-next", {}, "kimi_delta"),
        ("glm5-next", {}, "select_pools"),
        ("gemma4", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}, "scaled_mixture"),
    ],
)
def test_a_backend_without_an_operation_is_refused_by_its_name_before_a_weight_is_read(
    architecture: str, keys: dict[str, Any], op: str, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "x.gguf", TinyFamily(architecture, keys=keys))
    with open_checkpoint(path) as checkpoint:
        family = find_family(architecture)
        capability = replace(CAPABILITY, ops=family.capability.ops_of(checkpoint.metadata) - {op})
        with pytest.raises(UnsupportedFeatureError) as refused:
            make_plan(EngineOptions(model="x"), family, capability, checkpoint)

    assert refused.value.reasons == (f"backend {CAPABILITY.name} has no op {op}, which family {architecture} needs",)
