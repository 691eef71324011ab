"""Engines of one benchmark that lie in a GPU's memory at once keep smaller caches; a size that was said is kept."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pocketllm.bench.targets.rig import beside_others
from pocketllm.engine.options import EngineOptions

GIB = 1 << 30
MODEL = str(Path(__file__).parents[1] / "oracles" / "llama.gguf")


def planned(monkeypatch: pytest.MonkeyPatch, device: str) -> list[str]:
    """What is said; every plan is for this device, with 32 GiB of cache."""
    plan = SimpleNamespace(device=device, kv_bytes=32 * GIB)
    monkeypatch.setattr("pocketllm.engine.load.plan_and_open", lambda options, checkpoint, name: (plan, None))
    return []


def test_engines_on_one_gpu_share_twice_the_cache_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said = planned(monkeypatch, "cuda")

    assert beside_others(EngineOptions(model=MODEL), 4, said.append).kv_cache_bytes == 16 * GIB
    assert said == ["4 caches share the GPU's memory, 16.0 GiB each; --kv-cache-bytes says otherwise"]


def test_a_cache_size_that_was_said_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said = planned(monkeypatch, "cuda")

    assert beside_others(EngineOptions(model=MODEL, kv_cache_bytes=GIB), 4, said.append).kv_cache_bytes == GIB
    assert said == []


def test_engines_on_a_processor_keep_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = planned(monkeypatch, "cpu")

    assert beside_others(EngineOptions(model=MODEL), 4, said.append).kv_cache_bytes is None
    assert said == []
