"""What mimo2 says of a header: key heads and windows by layer, and every reason when it cannot run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.models.contract import KVSpec, SeveralCaches
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.parity.tiny_families import TinyFamily, write_family

HEADS = "attention.head_count_kv"
PATTERN = "attention.sliding_window_pattern"


def unmet(path: Path, keys: dict[str, Any] | None = None, **tensors: Any) -> list[str]:
    """Reasons for a tiny checkpoint with other keys or tensors than it should have."""
    spec = TinyFamily("mimo2", tensors=tensors, spoiled=keys or {})
    with open_checkpoint(write_family(path / "tiny.gguf", spec)) as checkpoint:
        return list(find_family("mimo2").unmet(checkpoint))


def test_global_and_local_layers_keep_heads_of_their_own_number(tmp_path: Path) -> None:
    keys = {"block_count": 4, HEADS: [2, 4, 4, 2], PATTERN: [False, True, True, False]}

    assert find_family("mimo2").kv_spec(TinyFamily("mimo2", keys=keys).metadata()) == SeveralCaches(
        (KVSpec(2, 2, 24, 16), KVSpec(2, 4, 24, 16, window=8))
    )
    assert unmet(tmp_path) == []


def test_one_number_of_key_heads_is_that_of_all_layers() -> None:
    keys = {HEADS: 2}

    assert find_family("mimo2").kv_spec(TinyFamily("mimo2", keys=keys).metadata()) == SeveralCaches(
        (KVSpec(1, 2, 24, 16), KVSpec(1, 2, 24, 16, window=8))
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (HEADS, [2, 4, 4], "metadata key mimo2.attention.head_count_kv is [2, 4, 4]: it must be a whole number"),
        (HEADS, [2, 0], "metadata key mimo2.attention.head_count_kv is [2, 0]: it must be a whole number above 0"),
        (HEADS, [3, 4], "4 query heads (mimo2.attention.head_count) cannot share 3 key heads"),
        (PATTERN, 6, "metadata key mimo2.attention.sliding_window_pattern must say true or false for each layer"),
        (PATTERN, [True], "metadata key mimo2.attention.sliding_window_pattern is [True]: it must say true or false"),
        ("rope.dimension_count", 26, "mimo2.rope.dimension_count=26 must be even and at most the head's 24 values"),
        ("attention.value_scale", 0.0, "metadata key mimo2.attention.value_scale is 0.0: it must be a number above 0"),
        ("expert_shared_count", 1, "mimo2.expert_shared_count=1 is not supported by family mimo2"),
        ("block_count", 2**32 - 1, "metadata key mimo2.attention.sliding_window_pattern is [False, True]: it must say"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused_with_the_key(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, {key: value})

    assert reasons[0].startswith(reason), reasons


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up_exps.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    assert unmet(tmp_path, **{name: None}) == [f"missing tensors: {name}"]


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.0.attn_qkv.weight", "blk.1.ffn_up_shexp.weight"])
def test_a_tensor_that_would_be_ignored_is_a_reason(name: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, **{name: np.zeros(4, np.float32)})

    assert reasons == [f"tensors the family does not know: {name}"]
