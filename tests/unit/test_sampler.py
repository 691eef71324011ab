import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pocketllm.engine.lifecycle.sampling import logits_processors
from pocketllm.engine.lifecycle.sampling.logits_processors import candidates
from pocketllm.engine.lifecycle.sampling.logprobs import token_logprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.sampler import Sampler

Logits = npt.NDArray[np.float32]
LOGITS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32))


def logits(*values: float) -> Logits:
    return np.array(values, np.float32)


def kept(values: Logits, **params: float) -> list[int]:
    return candidates(values, SamplingParams(**params))[0].tolist()  # type: ignore[arg-type]  # test data


# -- greedy
def test_greedy_takes_the_likeliest_and_the_lowest_id_of_a_tie() -> None:
    token_id, logprobs = Sampler(SamplingParams(temperature=0), 0).sample(logits(1, 7, 3, 7, 7))

    assert token_id == 1
    assert logprobs is None


@given(LOGITS)
def test_greedy_draws_nothing(values: Logits) -> None:
    sampler = Sampler(SamplingParams(temperature=0), 0)

    assert {sampler.sample(values)[0] for _ in range(3)} == {int(np.argmax(values))}


# -- which tokens may be drawn
def test_top_k_keeps_k_tokens_and_what_ties_with_the_last() -> None:
    assert kept(logits(1, 5, 3, 4), top_k=2) == [1, 3]
    assert kept(logits(1, 5, 3, 3), top_k=2) == [1, 2, 3]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 5, 9_999_999])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert kept(logits(1, 5, 3, 4), top_k=top_k) == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass() -> None:
    values = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))

    assert kept(values, top_p=0.3) == [1]
    assert kept(values, top_p=0.7) == [1, 3]
    assert kept(values, top_p=0.8) == [1, 2, 3]
    assert kept(values, top_p=1e-9) == [1]


def test_min_p_keeps_tokens_beside_the_likeliest() -> None:
    values = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))

    assert kept(values, min_p=0.4) == [1, 3]
    assert kept(values, min_p=1.0) == [1]


def test_a_nucleus_larger_than_the_guess_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(size=300).astype(np.float32)
    expected = kept(values, top_p=0.99)
    monkeypatch.setattr(logits_processors, "NUCLEUS_GUESS", 7)

    assert len(expected) > 7
    assert kept(values, top_p=0.99) == expected


def test_the_lower_ids_complete_a_nucleus_that_ends_in_a_tie() -> None:
    assert kept(logits(1, 2, 1, 2, 1), top_p=0.6) == [1, 3]
    assert kept(logits(1, 2, 1, 2, 1), top_p=0.75) == [0, 1, 3]
    assert kept(logits(0, 0, 0, 0), top_p=0.5) == [0, 1]


@given(LOGITS, st.floats(0.1, 3), st.integers(0, 70), st.floats(0.01, 1), st.floats(0, 1))
def test_candidates_are_a_distribution_that_holds_the_likeliest(
    values: Logits, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probabilities = candidates(values, params)

    assert ids.tolist() == sorted(set(ids.tolist()))
    assert probabilities.min() > 0
    assert math.isclose(probabilities.sum(), 1.0, rel_tol=1e-9)
    assert values[ids].max() >= values.max() - 1e-4
    # nothing that was left out is likelier than something that stayed
    left_out = np.setdiff1d(np.arange(len(values)), ids)
    if len(left_out):
        assert values[left_out].max() <= values[ids].min() + 1e-4


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.05), (1.5, 5, 0.5, 0.0), (0.3, 0, 0.95, 0.1), (1.0, 3, 0.99, 0.3)],
)
def test_the_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip(
        "transformers.generation.logits_process", reason="oracle-not-installed: transformers (the oracle extra)"
    )
    for seed in range(20):
        values = np.random.default_rng(seed).normal(scale=3, size=500).astype(np.float32)
        scores = torch.from_numpy(values)[None].double()
        chain = [warpers.TemperatureLogitsWarper(temperature)]
        chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
        chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
        for warper in chain:
            scores = warper(None, scores)
        expected = torch.softmax(scores, -1)[0].numpy()
        ids, probabilities = candidates(
            values, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        )

        assert ids.tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(probabilities, expected[ids], rtol=1e-6)


# -- draws
def draws(values: Logits, seed: int, count: int = 50, **params: float) -> list[int]:
    sampler = Sampler(SamplingParams(**params), seed)  # type: ignore[arg-type]  # test data
    return [sampler.sample(values)[0] for _ in range(count)]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    values = np.zeros(1000, np.float32)

    assert draws(values, 42) == draws(values, 42)
    assert draws(values, 42) != draws(values, 43)
    assert draws(values, -1) != draws(values, 1)


def test_draws_follow_the_probabilities() -> None:
    probabilities = np.array([0.05, 0.5, 0.0, 0.3, 0.15])
    with np.errstate(divide="ignore"):
        values = np.log(probabilities).astype(np.float32)
    counts = np.bincount(draws(values, 7, count=20_000), minlength=5)

    assert counts[2] == 0
    expected = probabilities * 20_000
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 16.3  # 99.9 % for 3 degrees of freedom


def test_one_token_takes_one_number_of_the_stream_whatever_the_filters() -> None:
    wide = np.zeros(64, np.float32)
    plain, mixed = Sampler(SamplingParams(), 5), Sampler(SamplingParams(), 5)
    filtered = Sampler(SamplingParams(top_k=3, top_p=0.5, min_p=0.1), 5)
    mixed._random.random()
    filtered.sample(wide)
    plain.sample(wide)

    assert plain._random.random() == filtered._random.random() == mixed._random.random()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(poison: float, temperature: float) -> None:
    with pytest.raises(FloatingPointError):
        Sampler(SamplingParams(temperature=temperature), 0).sample(logits(1, poison, 2))


# -- logprobs
def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    values = np.random.default_rng(3).normal(scale=4, size=300).astype(np.float32)
    token_id, logprobs = Sampler(SamplingParams(temperature=0.2, top_k=5, logprobs=20), 1).sample(values)
    exact = values.astype(np.float64) - math.log(sum(math.exp(value) for value in values.astype(np.float64)))

    assert logprobs is not None
    assert math.isclose(logprobs.chosen, exact[token_id], rel_tol=1e-12)
    assert logprobs.top_ids == tuple(np.argsort(-exact)[:20].tolist())
    np.testing.assert_allclose(logprobs.top_logprobs, np.sort(exact)[::-1][:20], rtol=1e-12)


def test_the_lower_id_comes_first_among_equal_logprobs() -> None:
    assert token_logprobs(logits(1, 2, 2, 2, 1), 0, 2).top_ids == (1, 2)


def test_logprobs_zero_reports_the_chosen_token_only() -> None:
    result = token_logprobs(logits(0, 0), 1, 0)

    assert (result.top_ids, result.top_logprobs) == ((), ())
    assert math.isclose(result.chosen, math.log(0.5))


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    assert token_logprobs(logits(0, 1, 2), 0, 20).top_ids == (2, 1, 0)


def test_large_logits_do_not_overflow() -> None:
    assert math.isclose(token_logprobs(logits(3e4, 0), 0, 1).chosen, 0.0)
    assert kept(logits(3e38, -3e38), temperature=0.01) == [0]
