"""Families over the headers of published models: as many tensors as their files have, and what a token keeps."""

from importlib import import_module
from math import prod
from typing import Any

import pytest

from pocketllm.engine.models.families import glm5_next
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.registry import find_family
from tests.parity.tiny_families import TinyFamily

LATENT = {"attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512}
LATENT |= {"rope.dimension_count": 64, "nextn_predict_layers": 1}
XING4 = LATENT | {
    "block_count": 41,
    "embedding_length": 3584,
    "feed_forward_length": 9216,
    "leading_dense_block_count": 2,
    "attention.head_count": 32,
    "attention.q_lora_rank": 768,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "expert_count": 64,
    "expert_used_count": 4,
    "expert_feed_forward_length": 1024,
}
GLM_5 = LATENT | {
    "block_count": 79,
    "embedding_length": 6144,
    "leading_dense_block_count": 3,
    "attention.head_count": 64,
    "attention.q_lora_rank": 2048,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "expert_count": 256,
    "expert_used_count": 8,
}
DEEPSEEK_V2_5 = {"block_count": 60, "leading_dense_block_count": 1, "expert_count": 160, "expert_used_count": 6}
DEEPSEEK_V3 = {"block_count": 61, "leading_dense_block_count": 3, "expert_count": 256, "expert_used_count": 8}
JOINED = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.head_count_kv": 4}
JOINED |= {"attention.key_length": 192, "attention.value_length": 128}
MINIMAX = {
    "block_count": 62,
    "embedding_length": 3072,
    "attention.head_count": 48,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "expert_count": 256,
    "expert_used_count": 8,
}
QWEN_FLASH = {
    "block_count": 48,
    "embedding_length": 2560,
    "attention.head_count": 24,
    "attention.head_count_kv": 2,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "rope.dimension_count": 64,
    "full_attention_interval": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 48,
    "ssm.inner_size": 6144,
    "attention.compress_ratios": [0, 0, 0, 4] * 12,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
}
MIMO_GLOBAL = (0, 5, 11, 17, 23, 29, 35, 41, 47)
MIMO = {
    "block_count": 48,
    "embedding_length": 4096,
    "attention.head_count": 64,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
    "attention.head_count_kv": [4 if layer in MIMO_GLOBAL else 8 for layer in range(48)],
    "attention.sliding_window": 128,
    "attention.sliding_window_pattern": [layer not in MIMO_GLOBAL for layer in range(48)],
}
GLM_5_3_FLASH = {
    "block_count": 46,
    "nextn_predict_layers": 1,
    "embedding_length": 4096,
    "feed_forward_length": 12288,
    "leading_dense_block_count": 3,
    "attention.head_count": 64,
    "attention.head_count_kv": [int(number % 4 == 3) for number in range(45)] + [1],
    "attention.q_lora_rank": 1536,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "kda.head_dim": 128,
    "expert_count": 288,
    "expert_used_count": 8,
    "expert_feed_forward_length": 2048,
    "swiglu_clamp_exp": [10.0] * 46,
    "swiglu_clamp_shexp": [10.0] * 46,
}
NEXTN_ALONE = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""A file may leave these two to the model's own embedding and head."""


def names(architecture: str, keys: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Tensors of the trunk with its own head, and of the layers behind it, of a file with everything."""
    header = HeaderReader(TinyFamily(architecture, keys=keys).metadata(), architecture)
    family: Any = import_module(f"pocketllm.engine.models.families.{architecture.replace('-', '_')}")
    needed, optional = family.tensor_shapes(family.read_shape(header, 131072))
    assert header.problems == []
    last = keys["block_count"] - keys.get("nextn_predict_layers", 0)
    behind = {name for name in optional if name.startswith(f"blk.{last}.")}
    return {*needed, *optional} - behind, behind


def test_xing4_has_the_tensors_of_its_file() -> None:
    trunk, behind = names("xing4_0", XING4)

    assert (len(trunk), len(behind)) == (953, 24)


@pytest.mark.parametrize(
    ("keys", "without_bias", "expected"),
    [
        (DEEPSEEK_V2_5 | JOINED, True, 959),
        (DEEPSEEK_V3 | JOINED, False, 1025),
        (DEEPSEEK_V3, False, 1086),
    ],
    ids=["V2.5, joined", "V3, joined", "V3, split"],
)
def test_deepseek_has_the_tensors_of_its_files(keys: dict[str, Any], without_bias: bool, expected: int) -> None:
    trunk, behind = names("deepseek2", keys)

    assert len([name for name in trunk if not (without_bias and name.endswith("exp_probs_b.bias"))]) == expected
    assert behind == set()


def test_glm_5_has_the_tensors_of_its_file() -> None:
    trunk, behind = names("glm-dsa", GLM_5)

    assert len(trunk) + len([name for name in behind if not name.endswith(NEXTN_ALONE)]) == 1809


def test_glm_5_3_flash_has_the_tensors_and_parameters_of_its_file() -> None:
    """1412 tensors and 320.76 billion parameters, with the layer that predicts a further token, which is like the last
    with attention but for its streams, beside four tensors of its own."""
    header = HeaderReader(TinyFamily("glm5-next", keys=GLM_5_3_FLASH).metadata(), "glm5-next")
    shape = glm5_next.read_shape(header, 154880)
    needed, optional = glm5_next.tensor_shapes(shape)
    trunk = {**needed, **optional}
    behind = {name: sizes for name, sizes in trunk.items() if name.startswith("blk.43.") and ".hc_" not in name}
    behind |= {"eh_proj": (4096, 8192), **dict.fromkeys(("enorm", "hnorm", "shared_head_norm"), (4096,))}
    parameters = sum(prod(sizes) for sizes in (*trunk.values(), *behind.values()))

    assert (len(trunk), len(behind)) == (1383, 29)
    assert sum(shape.has_attention) == 11
    assert round(parameters / 1e9, 2) == 320.76


def test_minimax_m2_has_the_tensors_of_its_file() -> None:
    trunk, behind = names("minimax-m2", MINIMAX)

    assert (len(trunk), behind) == (809, set())


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("xing4_0", XING4, 46_080),
        ("glm-dsa", GLM_5, 89_856 + 78 * 128 * 2),
        ("minimax-m2", MINIMAX, 253_952),
        ("qwen4exp", QWEN_FLASH, 27_648),
    ],
)
def test_a_token_keeps_the_published_bytes_in_half_precision(
    architecture: str, keys: dict[str, Any], expected: int
) -> None:
    metadata = TinyFamily(architecture, keys=keys).metadata()

    assert find_family(architecture).kv_spec(metadata).bytes_per_token(2) == expected


def test_mimo_pays_its_global_layers_for_every_token_and_its_local_ones_for_a_window() -> None:
    spec = find_family("mimo2").kv_spec(TinyFamily("mimo2", keys=MIMO).metadata())

    assert (spec.bytes_per_token(2), spec.window_tokens()) == (23_040, 128)
    assert spec.bytes_in_window(2) == 39 * 8 * (192 + 128) * 2
