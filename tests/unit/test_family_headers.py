"""Every family over headers that no exporter would write: a reason for what it cannot use, never an error of ours."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pocketllm.engine.models.registry import find_family, known_architectures
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import GGUFError
from tests.parity.tiny_families import TinyFamily, write_family
from tests.tiny import TinyLlama, write_llama

STRANGE = ("", [], [1, 2], ["a"], True, -2.5, float("nan"), 2**31)
MORE_KEYS = ("expert_gating_func", "expert_weights_norm", "rope.scaling.type", "rope.scaling.factor")


@pytest.mark.parametrize("architecture", known_architectures())
def test_a_strange_value_of_any_key_is_a_reason_or_is_not_read(architecture: str, tmp_path: Path) -> None:
    family, path = find_family(architecture), tmp_path / "tiny.gguf"
    made = write_llama(path, TinyLlama()) if architecture == "llama" else write_family(path, TinyFamily(architecture))
    with open_checkpoint(made) as checkpoint:
        keys = {key for key in checkpoint.metadata if key.startswith(f"{architecture}.")}
        for key in sorted(keys | {f"{architecture}.{name}" for name in MORE_KEYS}):
            for value in STRANGE:
                header = {**checkpoint.metadata, key: value}
                reasons = family.unmet(SimpleNamespace(metadata=header, tensors=checkpoint.tensors))
                assert all(isinstance(reason, str) and reason for reason in reasons), (key, value)
                if reasons:
                    continue
                assert family.kv_spec(header).bytes_per_token(2) > 0, (key, value)


@pytest.mark.parametrize("architecture", known_architectures())
def test_an_empty_header_is_refused_with_the_keys_it_lacks(architecture: str) -> None:
    with pytest.raises(GGUFError, match=f"metadata key {architecture}.block_count is absent"):
        find_family(architecture).kv_spec({})


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next", "qwen35moe", "qwen4exp", "deepseek2"])
def test_a_flag_that_is_neither_true_nor_false_is_refused(architecture: str, tmp_path: Path) -> None:
    with open_checkpoint(write_family(tmp_path / "tiny.gguf", TinyFamily(architecture))) as checkpoint:
        header = {**checkpoint.metadata, f"{architecture}.expert_weights_norm": "no"}
        reasons = find_family(architecture).unmet(SimpleNamespace(metadata=header, tensors=checkpoint.tensors))

    assert any("expert_weights_norm" in reason for reason in reasons)
