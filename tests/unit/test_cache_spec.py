"""What a model keeps of a token: bytes of each kind of cache, alone and side by side, against published models."""

from typing import Any

import pytest

from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.contract import (
    CacheSpec,
    CompressedSpec,
    KVSpec,
    LatentSpec,
    SeveralCaches,
    bytes_in_blocks,
)
from pocketllm.engine.models.registry import find_family
from tests.parity.tiny_families import TinyFamily

XING4 = {
    "block_count": 41,
    "nextn_predict_layers": 1,
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
    "attention.key_length_mla": 192,
    "attention.key_length": 576,
    "attention.value_length": 512,
}
DEEPSEEK4 = {
    "block_count": 43,
    "attention.head_count": 64,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.sliding_window": 128,
    "attention.compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 512,
    "rope.dimension_count": 64,
    "swiglu_clamp_exp": [10.0] * 43,
    "swiglu_clamp_shexp": [10.0] * 43,
    "hash_layer_count": 3,
}
"""DeepSeek-V4-Flash; the last ratio is of a layer that predicts further tokens."""


def of_header(architecture: str, keys: dict[str, Any]) -> CacheSpec:
    return find_family(architecture).kv_spec(TinyFamily(architecture, keys=keys).metadata())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (of_header("xing4_0", XING4), 46_080),
        (LatentSpec(78, 576), 89_856),  # GLM-5.2 without its indexer's keys
        (SeveralCaches((LatentSpec(78, 576), LatentSpec(78, 128))), 109_824),
        (KVSpec(62, 8, 128, 128), 253_952),  # MiniMax-M2.7
        (KVSpec(16, 4, 256, 256), 65_536),  # full layers of Qwen3.8-27B
        (SeveralCaches((KVSpec(12, 2, 256, 256), LatentSpec(12, 128))), 27_648),  # Qwen3.8-Flash-Next
        (of_header("deepseek4", DEEPSEEK4), 6_880),
        # DeepSeek-V4.1-Flash: entries and index keys of groups of 2 in three layers, of every token in one
        (SeveralCaches(tuple(CompressedSpec(n, dim, r) for n, r in ((3, 2), (1, 1)) for dim in (512, 128))), 3_200),
        (KVSpec(9, 4, 192, 128), 23_040),  # global layers of MiMo-V2.6-Flash
    ],
)
def test_bytes_of_a_token_in_half_precision_are_those_of_the_published_models(spec: CacheSpec, expected: int) -> None:
    assert spec.bytes_per_token(2) == expected


@pytest.mark.parametrize(
    "spec", [KVSpec(2, 3, 5, 7), LatentSpec(3, 11), SeveralCaches((LatentSpec(2, 4), KVSpec(1, 2, 6, 2)))]
)
def test_a_cache_takes_the_bytes_that_its_spec_says(spec: CacheSpec) -> None:
    cache = spec.allocate(select_backend("reference").ops, 6, 4)
    parts = cache if isinstance(spec, SeveralCaches) else (cache,)
    kept = [layers for part in parts for layers in vars(part).values() if isinstance(layers, list)]
    tensors = [tensor for layers in kept for tensor in layers]

    assert sum(tensor.nbytes for tensor in tensors) == 24 * spec.bytes_per_token(4)


@pytest.mark.parametrize("block_size", [4, 6, 12])
def test_a_compressed_cache_takes_the_bytes_that_its_blocks_say(block_size: int) -> None:
    spec = CompressedSpec(2, 5, 6)
    cache = spec.allocate(select_backend("reference").ops, 6, block_size)

    per_token = bytes_in_blocks(SeveralCaches((spec,)), 4, 0, block_size)
    assert sum(rows.nbytes for rows in cache.rows) == pytest.approx(6 * block_size * per_token, abs=6 * block_size)


def test_a_group_that_is_no_part_of_a_block_costs_the_block_a_whole_entry() -> None:
    spec = of_header("deepseek4", DEEPSEEK4)

    assert [bytes_in_blocks(spec, 2, 0, size) for size in (16, 128, 256)] == [8_000, 6_880, 6_880]


def test_what_lies_in_a_sequence_s_slot_is_a_window_and_its_unfinished_groups() -> None:
    window, overlapping, long = 43 * 127 * 512, 21 * 7 * 4 * (512 + 128), 20 * 127 * 2 * 512

    assert of_header("deepseek4", DEEPSEEK4).bytes_per_sequence() == 4 * (window + overlapping + long)


def test_scales_stand_beside_each_vector() -> None:
    assert KVSpec(2, 3, 5, 7).bytes_per_token(1, scale_bytes=4) == 2 * 3 * (12 + 8)
    assert LatentSpec(3, 11).bytes_per_token(1, scale_bytes=4) == 3 * (11 + 4)


def test_caches_side_by_side_come_in_their_order() -> None:
    ops = select_backend("reference").ops
    first, second = SeveralCaches((LatentSpec(1, 4), KVSpec(2, 1, 3, 3))).allocate(ops, 2, 4)

    assert [rows.shape for rows in first.rows] == [(2, 4, 1, 4)]
    assert [keys.shape for keys in second.keys] == [(2, 4, 1, 3)] * 2


def test_a_window_that_no_layer_has_is_none() -> None:
    spec = SeveralCaches((KVSpec(0, 2, 8, 8, window=5), KVSpec(3, 2, 8, 8)))

    assert (spec.window_tokens(), spec.bytes_in_window(2)) == (0, 0)
    assert SeveralCaches((KVSpec(1, 2, 8, 8, window=5), KVSpec(3, 2, 8, 8))).window_tokens() == 5
