"""Every plain family over the reference backend, held to transformers, and shown to notice the usual mistakes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.api.mixture import Gating
from pocketllm.engine.backends.api.ops import Norm, RopeLayout
from tests.parity.drive import Driver, Step, chunks, nmse
from tests.parity.oracle_files import ORACLES, checkpoints
from tests.parity.tiny_families import write_family
from tests.parity.transformers_families import SPECS

TOLERANCE = 1e-9
OF_OTHER_TESTS = ("llama", "q_Q4_1", "q_Q8_0", "q_Q4_K", "q_Q6_K", "deepseek_v4")
CHECKPOINTS = tuple(name for name in checkpoints() if name not in OF_OTHER_TESTS)
LENGTHS = [48, 31, 17, 5, 1]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def family(request: pytest.FixtureRequest) -> tuple[Driver, list[int], np.ndarray]:
    """A driver with the ids and logits of the committed oracle."""
    expected = np.load(ORACLES / f"{request.param}.npz")
    return Driver(ORACLES / f"{request.param}.gguf"), expected["input_ids"].tolist(), expected["logits"]


@pytest.mark.parametrize("size", [48, 7, 1], ids=["one batch", "chunks of seven", "token by token"])
def test_logits_agree_with_transformers_however_the_prompt_is_chunked(
    family: tuple[Driver, list[int], np.ndarray], size: int
) -> None:
    driver, ids, logits = family
    driver.reset()
    [got] = driver.run([ids], chunks(len(ids), size))

    assert nmse(got, logits) <= TOLERANCE


def test_five_sequences_together_agree_and_have_the_bits_of_each_alone(
    family: tuple[Driver, list[int], np.ndarray],
) -> None:
    driver, ids, logits = family
    prompts = [ids[:length] for length in LENGTHS]
    alone = []
    for prompt in prompts:
        driver.reset()
        alone += driver.run([prompt], chunks(len(prompt), 48))
    driver.reset()
    first: Step = [(sequence, -(-length // 2)) for sequence, length in enumerate(LENGTHS)]
    rest: Step = [(sequence, length // 2) for sequence, length in reversed(list(enumerate(LENGTHS))) if length > 1]
    together = driver.run(prompts, [first, rest])

    for part, other, length in zip(together, alone, LENGTHS, strict=True):
        assert nmse(part, logits[:length]) <= TOLERANCE
        assert np.array_equal(part, other)


def test_a_sequence_that_continues_on_the_blocks_of_another_gives_its_bits(
    family: tuple[Driver, list[int], np.ndarray],
) -> None:
    driver, ids, _ = family
    driver.reset()
    [cold] = driver.run([ids], chunks(len(ids), 48))
    driver.reset()
    driver.run([ids], [[(0, 32)]])
    driver.follow(0, 1)
    [_, warm] = driver.run([ids, ids], [[(1, 16)]])

    assert np.array_equal(warm, cold[32:])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_prefix_cache_hit_changes_no_token_and_no_logprob(name: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    prompt = list(range(20, 60))
    options = {"backend": "reference", "threads": 1, "max_model_len": 128}
    with LLM(str(ORACLES / f"{name}.gguf"), prefix_cache=False, **options) as llm:
        [cold] = llm.generate([prompt], params)
    with LLM(str(ORACLES / f"{name}.gguf"), **options) as llm:
        llm.generate([[*prompt[:35], 7, 8, 9]], params)
        [warm] = llm.generate([prompt], params)

    assert warm.usage.cached_tokens == 32
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.parametrize("name", SPECS)
def test_other_shapes_scalings_and_patterns_agree_with_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    path = write_family(tmp_path / "tiny.gguf", SPECS[name])
    ids = expected["input_ids"].tolist()
    [got] = Driver(path).run([ids], chunks(len(ids), 10))

    assert nmse(got, expected["logits"]) <= TOLERANCE


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
class Mistaken:
    """A backend's operations with some of them replaced; a replacement gets the right one first."""

    def __init__(self, ops: Any, replacements: dict[str, Callable[..., Any]]) -> None:
        self._ops, self._replacements = ops, replacements

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._ops, name)
        if name not in self._replacements:
            return right
        return lambda *arguments, **named: self._replacements[name](right, *arguments, **named)


def other_layout(right: Callable[..., Any], x: Any, angles: Any, head_dim: int, layout: RopeLayout) -> Any:
    return right(x, angles, head_dim, RopeLayout.ADJACENT)


def norm_plus_one(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    return right(x, Norm(norm.weight + 1, norm.eps))


def erf_gelu(right: Callable[..., Any], gate: Any, up: Any) -> Any:
    return 0.5 * gate * (1 + (gate / math.sqrt(2)).erf()) * up


def without_bias(right: Callable[..., Any], x: Any, *projections: Any, norm: Any = None) -> Any:
    return right(x, *(replace(projection, bias=None) for projection in projections), norm=norm)


def unscaled(right: Callable[..., Any], table: Any, ids: Any, scale: float = 1.0) -> Any:
    return right(table, ids)


def with_attention(**changes: Any) -> Callable[..., Any]:
    return lambda right, q, cache, layer, batch, spec: right(q, cache, layer, batch, replace(spec, **changes))


def with_routing(**changes: Any) -> Callable[..., Any]:
    return lambda right, x, experts: right(x, replace(experts, routing=replace(experts.routing, **changes)))


def window_off_by_one(right: Callable[..., Any], q: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, cache, layer, batch, spec if spec.window is None else replace(spec, window=spec.window + 1))


def norm_of_the_whole_row(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    repeats = x.shape[-1] // len(norm.weight)
    return right(x, Norm(norm.weight.repeat(repeats), norm.eps))


def heads_not_normed(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    return right(x, norm) if len(norm.weight) == x.shape[-1] else x


MISTAKES: Sequence[tuple[str, str, dict[str, Callable[..., Any]]]] = [
    ("qwen2", "neighbors rotate", {"rope": other_layout}),
    ("qwen2", "no biases", {"project": without_bias}),
    ("qwen3", "neighbors rotate", {"rope": other_layout}),
    ("qwen3", "queries and keys not normed", {"rms_norm": heads_not_normed}),
    ("qwen3", "rows of queries and keys normed whole", {"rms_norm": norm_of_the_whole_row}),
    ("qwen3_moe", "weights not normalized", {"mixture": with_routing(normalized=False)}),
    ("qwen3_moe", "sigmoid for softmax", {"mixture": with_routing(gating=Gating.SIGMOID)}),
    ("qwen3_moe", "one expert more", {"mixture": with_routing(num_used=3)}),
    ("qwen3_moe", "weights scaled", {"mixture": with_routing(scale=2.0)}),
    ("olmo2", "neighbors rotate", {"rope": other_layout}),
    ("olmo2", "one added to norms", {"rms_norm": norm_plus_one}),
    ("gemma2", "neighbors rotate", {"rope": other_layout}),
    ("gemma2", "one added to norms again", {"rms_norm": norm_plus_one}),
    ("gemma2", "gelu by erf", {"gelu_mul": erf_gelu}),
    ("gemma2", "embedding not scaled", {"embed": unscaled}),
    ("gemma2", "scores not capped", {"attention": with_attention(softcap=None)}),
    ("gemma2", "all layers global", {"attention": with_attention(window=None)}),
    ("gemma2", "all layers local", {"attention": with_attention(window=8)}),
    ("gemma2", "window off by one", {"attention": window_off_by_one}),
    ("gemma3_text", "neighbors rotate", {"rope": other_layout}),
    ("gemma3_text", "one added to norms again", {"rms_norm": norm_plus_one}),
    ("gemma3_text", "gelu by erf", {"gelu_mul": erf_gelu}),
    ("gemma3_text", "embedding not scaled", {"embed": unscaled}),
    ("gemma3_text", "all layers global", {"attention": with_attention(window=None)}),
    ("gemma3_text", "all layers local", {"attention": with_attention(window=8)}),
    ("gemma3_text", "window off by one", {"attention": window_off_by_one}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "replacements"), MISTAKES, ids=[f"{n}: {m}" for n, m, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(
    name: str, mistake: str, replacements: dict[str, Callable[..., Any]]
) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(ORACLES / f"{name}.gguf")
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))
    [got] = driver.run([expected["input_ids"].tolist()], chunks(48, 48))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3_4b"])
def test_local_layers_that_rotate_like_global_ones_are_seen(name: str, tmp_path: Path) -> None:
    path = ORACLES / f"{name}.gguf" if name == "gemma3_text" else write_family(tmp_path / "x.gguf", SPECS[name])
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(path)
    for mistake in ({"local_freq": driver.model.global_freq}, {"global_freq": driver.model.local_freq}):
        driver.reset()
        right, driver.model = driver.model, replace(driver.model, **mistake)
        [got] = driver.run([expected["input_ids"].tolist()], chunks(len(expected["input_ids"]), 48))
        driver.model = right

        assert nmse(got, expected["logits"]) > 10 * TOLERANCE


def test_a_smollm3_layer_that_rotates_and_should_not_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.load(ORACLES / "smollm3.npz")
    driver = Driver(write_family(tmp_path / "x.gguf", SPECS["smollm3"]))
    monkeypatch.setattr("pocketllm.engine.models.families.smollm3.PERIOD", 6)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(24, 24))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


def test_logits_that_are_not_capped_are_seen() -> None:
    expected = np.load(ORACLES / "gemma2.npz")
    driver = Driver(ORACLES / "gemma2.gguf")
    driver.model = replace(driver.model, logit_cap=1e9)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(48, 48))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE
