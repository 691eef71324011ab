"""Families with layers that see a window, over blocks that are given back: the very bits of a cache that keeps all."""

from pathlib import Path
from typing import Any

import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.engine.models import blocks
from pocketllm.engine.models.contract import KVSpec, SeveralCaches
from pocketllm.engine.models.families import gemma4
from pocketllm.engine.plan.memory import BlockBytes
from tests.native import needs_native
from tests.tiny import TinyLlama, write_llama

ORACLES = Path(__file__).parents[1] / "oracles"
NAMES = ("gemma2", "gemma3_text", "gpt_oss", "mimo_v2_flash", "gemma4_text")
PROMPTS = [[number, *range(30, 30 + 9 * number)] for number in range(1, 6)]
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 128, "block_size": 4}
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=1)
Told = list[tuple[list[int], Any]]


def told(answers: Any) -> Told:
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def without_windows(spec: SeveralCaches) -> SeveralCaches:
    """The same with every token kept."""
    assert spec.window_tokens() == 8
    parts = (part for part in spec.parts if isinstance(part, KVSpec))
    return SeveralCaches(tuple(KVSpec(p.num_layers, p.num_kv_heads, p.key_dim, p.value_dim) for p in parts))


@pytest.fixture(scope="module", params=["reference", pytest.param("cpu", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=NAMES)
def kept(request: pytest.FixtureRequest, backend: str) -> tuple[str, Told]:
    """A checkpoint, and what it answers to each prompt alone when nothing is given back."""
    path = str(ORACLES / f"{request.param}.gguf")
    caches, cache = blocks.Windows.caches, gemma4.Gemma4Shape.cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.Windows, "caches", lambda *args: without_windows(caches(*args)))
        patch.setattr(gemma4.Gemma4Shape, "cache", property(lambda shape: without_windows(cache.fget(shape))))
        with LLM(path, backend=backend, prefix_cache=False, max_num_seqs=1, **OPTIONS) as llm:
            assert llm.engine.plan.limits.window == 0
            return path, told(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("chunk", [256, 5], ids=["whole prompts", "chunks of five"])
def test_requests_together_get_the_bits_of_each_alone(kept: tuple[str, Told], backend: str, chunk: int) -> None:
    path, expected = kept
    with LLM(path, backend=backend, prefill_chunk=chunk, **OPTIONS) as llm:
        assert llm.engine.plan.limits.window == 8
        assert told(llm.generate(PROMPTS, PARAMS)) == expected


def test_an_answer_behind_found_blocks_has_the_bits_of_a_cold_one(kept: tuple[str, Told], backend: str) -> None:
    path, expected = kept
    with LLM(path, backend=backend, max_num_seqs=2, **OPTIONS) as llm:
        llm.generate([[*PROMPTS[4][:30], 7, 8, 9]], PARAMS)
        [warm] = llm.generate([PROMPTS[4]], PARAMS)

    assert warm.usage.cached_tokens == 28
    assert told([warm]) == expected[4:]


def test_requests_that_are_preempted_get_the_bits_of_each_alone(
    kept: tuple[str, Told], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = kept
    # little more than one request takes, so that five share its room and some begin again
    monkeypatch.setattr(BlockBytes, "divide", lambda *_: (24, 24))
    with LLM(path, backend=backend, prefill_chunk=8, reserve=0.0, **{**OPTIONS, "max_model_len": 80}) as llm:
        together = told(llm.generate(PROMPTS, PARAMS))
        num_preemptions = llm.engine.loop.stats().num_preemptions

    assert together == expected
    assert num_preemptions > 0


def test_requests_of_a_model_that_keeps_nothing_but_windows_get_the_bits_of_each_alone(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_llama(tmp_path / "x.gguf", TinyLlama(seed=17, metadata={"llama.attention.sliding_window": 8})))
    with LLM(path, backend=backend, prefix_cache=False, max_num_seqs=1, **OPTIONS) as llm:
        expected = told(llm.generate(PROMPTS, PARAMS))
    with LLM(path, backend=backend, prefill_chunk=5, **OPTIONS) as llm:
        together = told(llm.generate(PROMPTS, PARAMS))
        [warm] = llm.generate([PROMPTS[4]], PARAMS)
    monkeypatch.setattr(BlockBytes, "divide", lambda *_: (24, 24))
    with LLM(path, backend=backend, prefill_chunk=8, reserve=0.0, **{**OPTIONS, "max_model_len": 80}) as llm:
        preempted = told(llm.generate(PROMPTS, PARAMS))
        num_preemptions = llm.engine.loop.stats().num_preemptions

    assert together == preempted == expected
    assert told([warm]) == expected[4:]
    assert warm.usage.cached_tokens > 0
    assert num_preemptions > 0
