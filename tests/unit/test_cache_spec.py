"""What a model keeps of a token: bytes of each kind of cache, alone and side by side, against published models."""

from typing import Any

import pytest

from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.contract import CacheSpec, KVSpec, LatentSpec, SeveralCaches
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
    tensors = [tensor for part in parts for layers in vars(part).values() for tensor in layers]

    assert sum(tensor.nbytes for tensor in tensors) == 24 * spec.bytes_per_token(4)


def test_scales_stand_beside_each_vector() -> None:
    assert KVSpec(2, 3, 5, 7).bytes_per_token(1, scale_bytes=4) == 2 * 3 * (12 + 8)
    assert LatentSpec(3, 11).bytes_per_token(1, scale_bytes=4) == 3 * (11 + 4)


def test_caches_side_by_side_come_in_their_order() -> None:
    ops = select_backend("reference").ops
    first, second = SeveralCaches((LatentSpec(1, 4), KVSpec(2, 1, 3, 3))).allocate(ops, 2, 4)

    assert [rows.shape for rows in first.rows] == [(2, 4, 1, 4)]
    assert [keys.shape for keys in second.keys] == [(2, 4, 1, 3)] * 2
