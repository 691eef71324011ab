"""What the plain families say of a header: sizes when it can run, every reason when it cannot."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.models.blocks import Windows
from pocketllm.engine.models.contract import CacheSpec, KVSpec, SeveralCaches
from pocketllm.engine.models.families import gemma3, qwen2
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.decoder_family import plain_family
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import GGUFError
from tests.parity.tiny_families import TinyFamily, write_family

FAMILIES = ("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3", "qwen3moe", "minimax-m2")


def unmet(path: Path, architecture: str, keys: dict[str, Any] | None = None, **tensors: Any) -> list[str]:
    """Reasons for a tiny checkpoint with other keys or tensors than it should have."""
    spec = TinyFamily(architecture, tensors=tensors, spoiled=keys or {})
    with open_checkpoint(write_family(path / "tiny.gguf", spec)) as checkpoint:
        return list(find_family(architecture).unmet(checkpoint))


def kv_layers(spec: CacheSpec) -> list[tuple[int, int, int]]:
    """Key heads, size of a key and of a value of each layer, whether it sees a window or all."""
    parts = spec.parts if isinstance(spec, SeveralCaches) else (spec,)
    kept = [part for part in parts if isinstance(part, KVSpec)]
    assert len(kept) == len(parts)
    return [(part.num_kv_heads, part.key_dim, part.value_dim) for part in kept for _ in range(part.num_layers)]


def test_a_plain_family_keeps_16_bits_of_rows_unless_its_file_says_otherwise() -> None:
    parts = ("new", frozenset[str](), qwen2.tensor_shapes, qwen2.bind_model)

    assert plain_family(*parts).capability.least_activations == "int16"
    assert plain_family(*parts, activation_bits=8).capability.least_activations == "int8"
    assert {find_family(name).capability.activation_bits for name in ("qwen2", "qwen3", "smollm3")} == {8}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_is_found_and_takes_a_checkpoint_of_its_own(architecture: str, tmp_path: Path) -> None:
    family = find_family(architecture)
    metadata = TinyFamily(architecture, keys={"attention.key_length": 24}).metadata()

    assert family.architecture == architecture
    assert kv_layers(family.kv_spec(metadata)) == [(2, 24, 24)] * 2
    assert family.context_length(metadata) == 512
    assert unmet(tmp_path, architecture) == []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_absent_key_is_named_at_once(architecture: str) -> None:
    with pytest.raises(GGUFError) as raised:
        find_family(architecture).kv_spec({})

    for key in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"):
        assert f"metadata key {architecture}.{key} is absent" in str(raised.value)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.clamp_kqv", 8.0, "{}.attention.clamp_kqv=8.0 is not supported by family {}"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' ({}.rope.scaling.type) is not supported by"),
        ("attention.head_count_kv", 3, "4 query heads ({}.attention.head_count) cannot share 3 key heads"),
        ("block_count", 2**32 - 1, "{}.block_count=4294967295, but there are"),
        ("attention.value_length", 8, "values of 8 beside keys of 16 ({}.attention.value_length"),
        ("logit_scale", 2.0, "{}.logit_scale=2.0 is not supported by family {}"),
    ],
)  # fmt: skip
def test_a_header_that_asks_for_something_else_is_refused_with_the_key(
    architecture: str, key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    reasons = unmet(tmp_path, architecture, {key: value})

    assert any(reason.format(architecture, architecture) in line for line in reasons), reasons


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen2", "attention.sliding_window", 64),
        ("qwen3", "attention.sliding_window", 64),
        ("smollm3", "attention.sliding_window", 64),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_shared_count", 1),
        ("qwen3moe", "leading_dense_block_count", 1),
        ("gemma2", "rope.freq_base_swa", 5000.0),
        ("gemma3", "attn_logit_softcapping", 30.0),
        ("qwen3", "attn_logit_softcapping", 30.0),
        ("qwen3", "expert_count", 8),
    ],
)
def test_a_feature_of_another_family_is_refused(architecture: str, key: str, value: Any, tmp_path: Path) -> None:
    [reason] = unmet(tmp_path, architecture, {key: value})

    assert reason == f"{architecture}.{key}={value} is not supported by family {architecture}"


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("gemma2", "blk.0.post_ffw_norm.weight"),
        ("gemma3", "blk.1.attn_k_norm.weight"),
        ("olmo2", "blk.1.post_attention_norm.weight"),
        ("smollm3", "blk.1.attn_norm.weight"),
        ("qwen3moe", "blk.0.ffn_gate_inp.weight"),
        ("minimax-m2", "blk.1.attn_q_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(architecture: str, name: str, tmp_path: Path) -> None:
    assert unmet(tmp_path, architecture, **{name: None}) == [f"missing tensors: {name}"]


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen2", "blk.0.attn_q_norm.weight"),
        ("qwen3", "blk.0.ffn_up.bias"),
        ("gemma2", "blk.0.attn_q_norm.weight"),
        ("gemma3", "blk.0.attn_q.bias"),
        ("olmo2", "blk.0.attn_norm.weight"),
        ("smollm3", "blk.0.attn_q_norm.weight"),
        ("qwen3moe", "blk.0.exp_probs_b.bias"),
        ("minimax-m2", "blk.0.ffn_gate_shexp.weight"),
    ],
)
def test_a_tensor_that_would_be_ignored_is_a_reason(architecture: str, name: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, architecture, **{name: np.zeros(64, np.float32)})

    assert reasons == [f"tensors the family does not know: {name}"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tied_head_is_the_embedding_itself(architecture: str, tmp_path: Path) -> None:
    from pocketllm.engine.backends.select import select_backend

    for tied in (True, False):
        path = write_family(tmp_path / "tiny.gguf", TinyFamily(architecture, tied=tied))
        with open_checkpoint(path) as checkpoint:
            model: Any = find_family(architecture).load(checkpoint, select_backend("reference").ops, 64)

        assert (model.head.weight is model.embedding) is tied


def test_more_experts_used_than_there_are_is_a_problem(tmp_path: Path) -> None:
    assert unmet(tmp_path, "qwen3moe", {"expert_used_count": 9}) == [
        "metadata key qwen3moe.expert_used_count is 9: there are only 8 experts"
    ]


# -- which layers are local ------------------------------------------------------------------------------------------
def windows(**keys: Any) -> tuple[Windows, list[str]]:
    header = HeaderReader(TinyFamily("gemma3", keys={"block_count": 7, **keys}).metadata(), "gemma3")
    return gemma3.read_shape(header).windows, header.problems


def test_gemma3_has_a_global_layer_after_five_local_ones() -> None:
    found, problems = windows(**{"attention.sliding_window": 512})

    assert [found.of(layer) for layer in range(7)] == [512] * 5 + [None, 512]
    assert problems == []


def test_gemma2_begins_with_a_local_layer_and_has_a_window_of_its_own() -> None:
    family = import_module("pocketllm.engine.models.families.gemma2")
    found = family.read_shape(HeaderReader(TinyFamily("gemma2").metadata(), "gemma2")).windows

    assert [found.of(layer) for layer in range(4)] == [4096, None, 4096, None]


def test_a_pattern_says_of_each_layer_whether_it_is_local() -> None:
    pattern = [True, False, False, True, False, True, True]
    found, problems = windows(**{"attention.sliding_window": 9, "attention.sliding_window_pattern": pattern})

    assert [found.of(layer) == 9 for layer in range(7)] == pattern
    assert problems == []


@pytest.mark.parametrize("size", [None, 0])
def test_without_a_window_every_layer_is_global(size: int | None) -> None:
    found, problems = windows(**{"attention.sliding_window": size})

    assert {found.of(layer) for layer in range(7)} == {None}
    assert problems == []


@pytest.mark.parametrize("pattern", [[True, False], [2] * 7, ["a"] * 7, [[True]] * 7])
def test_a_pattern_that_does_not_fit_the_layers_is_a_problem(pattern: list[Any]) -> None:
    metadata = TinyFamily("gemma3", keys={"block_count": 7, "attention.sliding_window": 9}).metadata()
    header = HeaderReader({**metadata, "gemma3.attention.sliding_window_pattern": pattern}, "gemma3")
    gemma3.read_shape(header)

    [problem] = header.problems
    assert "gemma3.attention.sliding_window_pattern is " in problem
    assert "it must say true or false for each layer" in problem


@pytest.mark.parametrize(
    ("architecture", "layers", "divisor"),
    [("gemma2", 46, 16), ("gemma2", 42, 24), ("gemma3", 62, 16), ("gemma3", 34, 24)],
)
def test_scores_of_the_27b_sizes_are_divided_by_the_root_of_hidden_over_heads(
    architecture: str, layers: int, divisor: int
) -> None:
    keys = {"block_count": layers, "attention.key_length": 24}
    family = import_module(f"pocketllm.engine.models.families.{architecture}")
    shape = family.read_shape(HeaderReader(TinyFamily(architecture, keys=keys).metadata(), architecture))

    assert shape.scale == pytest.approx(divisor**-0.5)
