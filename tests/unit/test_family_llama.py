"""What family llama says of a header: sizes when it can run, every reason when it cannot."""

from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.models import registry
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.models.families.llama import FAMILY
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import GGUFError
from tests.tiny import TinyLlama, write_llama


@pytest.fixture
def unmet(tmp_path: Path):
    """Reasons for a tiny checkpoint with the given differences."""

    def ask(**differences: object) -> list[str]:
        path = write_llama(tmp_path / "tiny.gguf", TinyLlama(**differences))
        with open_checkpoint(path) as checkpoint:
            return list(FAMILY.unmet(checkpoint))

    return ask


def test_a_family_is_found_by_its_architecture() -> None:
    assert registry.find_family("llama") is FAMILY
    assert FAMILY.architecture == "llama"


@pytest.mark.parametrize("name", ["foo", "", "../contract", "llama.x", "Llama"])
def test_an_unknown_architecture_lists_the_known(name: str) -> None:
    with pytest.raises(LookupError, match=r"no model family .*; known: .*llama"):
        registry.find_family(name)


def test_architectures_are_spelled_as_a_checkpoint_names_them() -> None:
    known = registry.known_architectures()

    assert {"xing4_0", "glm-dsa", "gpt-oss"} <= set(known)
    assert all(registry.find_family(name).architecture == name for name in known)


def test_a_family_file_that_is_broken_is_not_an_unknown_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_done.py").write_text("import a_module_that_is_not_there")
    monkeypatch.setattr(registry.families, "__path__", [*registry.families.__path__, str(tmp_path)])
    registry.known_architectures.cache_clear()
    try:
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
            registry.find_family("half-done")
    finally:
        registry.known_architectures.cache_clear()


def test_sizes_come_from_the_header_alone(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", TinyLlama(num_layers=3, num_kv_heads=1, head_dim=24, context=77))
    with open_checkpoint(path) as checkpoint:
        assert FAMILY.kv_spec(checkpoint.metadata) == KVSpec(3, 1, 24, 24)
        assert FAMILY.context_length(checkpoint.metadata) == 77
        assert FAMILY.unmet(checkpoint) == []


def test_a_head_without_a_written_size_is_the_hidden_size_over_the_heads() -> None:
    metadata = {
        "llama.block_count": 1,
        "llama.embedding_length": 96,
        "llama.attention.head_count": 4,
        "llama.feed_forward_length": [32],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 16,
    }

    assert FAMILY.kv_spec(metadata) == KVSpec(1, 4, 24, 24)


def test_every_absent_key_is_named_at_once() -> None:
    with pytest.raises(GGUFError) as raised:
        FAMILY.kv_spec({})

    for key in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"):
        assert f"metadata key llama.{key} is absent" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", None, "metadata key llama.block_count is absent: it must be a whole number above 0"),
        ("attention.head_count", 0, "metadata key llama.attention.head_count is 0: it must be a whole number above 0"),
        ("embedding_length", "wide", "metadata key llama.embedding_length is 'wide': it must be a whole number"),
        (
            "attention.layer_norm_rms_epsilon",
            -1.0,
            "llama.attention.layer_norm_rms_epsilon is -1.0: it must be a number",
        ),
        (
            "attention.head_count_kv",
            [2, 1],
            "llama.attention.head_count_kv is [2, 1]: layers of different sizes are not",
        ),
        (
            "attention.head_count_kv",
            [[2], [2]],
            "llama.attention.head_count_kv is [2]: it must be a whole number above 0",
        ),
        ("attention.head_count_kv", 3, "4 query heads (llama.attention.head_count) cannot share 3 key heads"),
        ("attention.value_length", 8, "values of 8 beside keys of 16"),
        ("rope.dimension_count", 18, "llama.rope.dimension_count=18 must be even and at most the head's 16 values"),
        ("rope.dimension_count", 7, "llama.rope.dimension_count=7 must be even and at most the head's 16 values"),
        (
            "rope.scaling.type",
            "longrope",
            "rope scaling 'longrope' (llama.rope.scaling.type) is not supported by family",
        ),
        ("expert_count", 8, "llama.expert_count=8 is not supported by family llama"),
        ("attention.sliding_window", 2.5, "llama.attention.sliding_window is 2.5: it must be a whole number, or 0"),
        ("block_count", 2**32 - 1, "llama.block_count=4294967295, but there are 21 tensors in all"),
        ("rope.freq_base", 1.0, "llama.rope.freq_base=1.0 must be above 1"),
        ("logit_scale", 2.0, "llama.logit_scale=2.0 is not supported by family llama"),
    ],
)
def test_a_header_that_asks_for_something_else_is_refused_with_the_key(unmet, key: str, value, reason: str) -> None:
    reasons = unmet(metadata={f"llama.{key}": value})

    assert any(reason in line for line in reasons), reasons


def test_a_list_with_the_same_size_for_all_layers_is_that_size(unmet) -> None:
    assert unmet(metadata={"llama.attention.head_count_kv": [2, 2]}) == []


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"])
def test_a_missing_tensor_is_named(unmet, name: str) -> None:
    assert unmet(tensors={name: None}) == [f"missing tensors: {name}"]


def test_a_tokenizer_larger_than_the_embedding_is_refused(unmet) -> None:
    small = {name: np.zeros((500, 64), np.float32) for name in ("token_embd.weight", "output.weight")}

    assert unmet(tensors=small) == ["the tokenizer has 512 tokens and token_embd.weight only 500 rows"]


def test_many_missing_tensors_are_counted(unmet) -> None:
    [reason] = unmet(metadata={"llama.block_count": 4})

    assert reason.startswith("missing tensors: blk.2.attn_norm.weight, ")
    assert reason.endswith(" and 10 more")


def test_a_tensor_of_another_shape_is_named_with_both(unmet) -> None:
    wrong = np.zeros((96, 60), np.float32)

    assert unmet(tensors={"blk.0.ffn_up.weight": wrong}) == [
        "tensor blk.0.ffn_up.weight has shape (96, 60), expected (96, 64)"
    ]


def test_a_tensor_that_would_be_ignored_is_a_reason(unmet) -> None:
    reasons = unmet(tensors={"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)})

    assert reasons == ["tensors the family does not know: blk.0.attn_q_norm.weight"]


def test_all_reasons_come_together(unmet) -> None:
    reasons = unmet(metadata={"llama.expert_count": 8, "llama.rope.scaling.type": "su", "llama.block_count": None})

    assert len(reasons) == 3


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    from pocketllm.engine.backends.select import BackendOptions, select_backend

    for tied in (True, False):
        with open_checkpoint(write_llama(tmp_path / "tiny.gguf", TinyLlama(tied=tied))) as checkpoint:
            model = FAMILY.load(checkpoint, select_backend("reference", BackendOptions(threads=1)).ops, 64)

        assert (model.head.weight is model.embedding) is tied
