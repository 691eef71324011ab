import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pocketllm.engine.lifecycle.sampling import logits_processors
from pocketllm.engine.lifecycle.sampling.logits_processors import candidates
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs, token_logprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.penalties import Penalties
from pocketllm.engine.lifecycle.sampling.sampler import STRIDE, Sampler, place_of
from pocketllm.errors import RequestError

Logits = npt.NDArray[np.float32]
LOGITS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32))


def sample(sampler: Sampler, values: Logits) -> tuple[int, TokenLogprobs | None]:
    """The next token, which the answer then has."""
    token_id, logprobs = sampler.choose(values)
    sampler.accept(token_id)
    return token_id, logprobs


def logits(*values: float) -> Logits:
    return np.array(values, np.float32)


def distribution(values: Logits, **params: Any) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Ids that may be drawn and their probabilities."""
    ids, weights = candidates(values, SamplingParams(**params))
    found = np.arange(len(values)) if ids is None else ids
    probabilities = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return found[weights > 0].tolist(), probabilities[weights > 0]


def kept(values: Logits, **params: Any) -> list[int]:
    return distribution(values, **params)[0]


# -- greedy
def test_greedy_takes_the_likeliest_and_the_lowest_id_of_a_tie() -> None:
    token_id, logprobs = Sampler(SamplingParams(temperature=0), 0).choose(logits(1, 7, 3, 7, 7))

    assert token_id == 1
    assert logprobs is None


@given(LOGITS)
def test_greedy_draws_nothing(values: Logits) -> None:
    sampler = Sampler(SamplingParams(temperature=0), 0)

    assert {sample(sampler, values)[0] for _ in range(3)} == {int(np.argmax(values))}


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


@given(st.integers(0, 2**32), st.integers(1, 6000), st.integers(1, 900), st.sampled_from([2, 300, 10**6]))
def test_the_largest_are_found_among_column_maxima_as_sorting_would_find_them(
    seed: int, size: int, count: int, num_values: int
) -> None:
    values = np.random.default_rng(seed).integers(0, num_values, size).astype(np.float32)
    count = min(count, size)
    descending = np.sort(values)[::-1]

    assert logits_processors.top_k(values, count).tolist() == np.flatnonzero(values >= descending[count - 1]).tolist()
    assert logits_processors.largest(values, count).tolist() == descending[:count].tolist()


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


@given(LOGITS, st.floats(0.1, 3), st.integers(0, 70), st.floats(0.01, 1), st.floats(0, 1), st.sampled_from([1.0, 0.6]))
def test_candidates_are_a_distribution_that_holds_the_likeliest(
    values: Logits, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    ids, probabilities = distribution(
        values, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )

    assert ids == sorted(set(ids))
    assert math.isclose(probabilities.sum(), 1.0, rel_tol=1e-9)
    if typical_p < 1.0:
        return
    assert values[ids].max() >= values.max() - 1e-4
    # nothing that was left out is likelier than something that stayed
    left_out = np.setdiff1d(np.arange(len(values)), ids)
    if len(left_out):
        assert values[left_out].max() <= values[ids].min() + 1e-4


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "typical_p"),
    [
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.7, 40, 0.9, 0.05, 1.0),
        (1.5, 5, 0.5, 0.0, 1.0),
        (0.3, 0, 0.95, 0.1, 1.0),
        (1.0, 3, 0.99, 0.3, 1.0),
        (0.9, 0, 1.0, 0.02, 1.0),
        (1.5, 0, 0.6, 0.1, 1.0),
        (1.0, 0, 1.0, 0.0, 0.5),
        (0.8, 50, 0.95, 0.0, 0.9),
    ],
)
def test_the_filters_keep_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    import torch

    warpers = pytest.importorskip(
        "transformers.generation.logits_process", reason="missing-extra: oracle (transformers)"
    )
    for seed in range(20):
        values = np.random.default_rng(seed).normal(scale=3, size=500).astype(np.float32)
        scores = torch.from_numpy(values)[None].double()
        chain = [warpers.TemperatureLogitsWarper(temperature)]
        chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
        chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
        chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
        chain += [warpers.TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
        for warper in chain:
            scores = warper(None, scores)
        expected = torch.softmax(scores, -1)[0].numpy()
        ids, probabilities = distribution(
            values, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
        )

        assert ids == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(probabilities, expected[ids], rtol=1e-5)


def test_typical_p_keeps_tokens_of_average_surprise() -> None:
    values = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], np.float32))  # entropy 1.47: surprise 1.61 is nearest

    assert kept(values, typical_p=0.3) == [1, 2]
    assert kept(values, typical_p=0.5) == [0, 1, 2]


# -- bias and penalties
TOKENS = st.lists(st.integers(0, 9), max_size=12)


def plainly(
    values: Logits, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """The statement of vLLM's definition, token by token."""
    result = values.copy()
    for token_id, bias in params.logit_bias:
        result[token_id] += np.float32(bias)
    for token_id in {*prompt, *answer}:
        factor = np.float32(params.repetition_penalty)
        result[token_id] = result[token_id] / factor if result[token_id] > 0 else result[token_id] * factor
    for token_id in set(answer):
        fall = np.float32(params.frequency_penalty) * answer.count(token_id) + np.float32(params.presence_penalty)
        result[token_id] -= fall
    return result


@given(
    hnp.arrays(np.float32, 10, elements=st.floats(-30, 30, width=32)),
    TOKENS,
    TOKENS,
    st.floats(0.1, 3),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=4),
)
def test_penalties_are_those_of_their_plain_statement(
    values: Logits,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,  # type: ignore[arg-type]  # kept as pairs
    )
    penalties = Penalties(params, prompt)
    for token_id in answer:
        penalties.append(token_id)

    adjusted = values.copy()
    for edit in penalties.edits():
        edit.apply(adjusted)
    np.testing.assert_array_equal(adjusted, plainly(values, prompt, answer, params))


@pytest.mark.oracle
def test_the_repetition_penalty_is_that_of_transformers() -> None:
    import torch

    processors = pytest.importorskip(
        "transformers.generation.logits_process", reason="missing-extra: oracle (transformers)"
    )
    values = np.random.default_rng(2).normal(scale=4, size=100).astype(np.float32)
    prompt = [5, 7, 7, 99]
    expected = processors.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt]), torch.from_numpy(values)[None])

    adjusted = values.copy()
    [edit] = Penalties(SamplingParams(repetition_penalty=1.3), prompt).edits()
    edit.apply(adjusted)
    np.testing.assert_array_equal(adjusted, expected[0].numpy())


def test_penalties_act_on_greedy_requests_and_count_what_was_drawn() -> None:
    values = logits(3, 2.5, 2, -1)
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=0.75), 0)

    assert [sample(sampler, values)[0] for _ in range(4)] == [0, 1, 0, 0]


def test_a_bias_forces_and_forbids_and_logprobs_are_those_before_it() -> None:
    params = SamplingParams(temperature=0, logit_bias={2: 100, 1: -100}, logprobs=1)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    token_id, logprobs = Sampler(params, 0).choose(logits(1, 2, 0))

    assert token_id == 2
    assert logprobs is not None
    assert logprobs.top_ids == (1,)


def test_without_penalties_nothing_is_copied_or_kept() -> None:
    assert not Penalties.are_asked_for(SamplingParams(temperature=0.5, top_p=0.5))
    for asked in ({"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1}, {"frequency_penalty": -1}):
        assert Penalties.are_asked_for(SamplingParams(**asked))  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": math.inf},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -3},
        {"typical_p": 0},
        {"typical_p": True},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": [1, 2]},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
    ids=str,
)
def test_what_cannot_be_honored_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)

    assert caught.value.param == next(iter(wrong))


# -- draws
def test_the_largest_share_finds_a_place_with_weight_though_sums_differ_in_their_last_bit() -> None:
    for seed in range(50):  # of these, many have a sum of strides above their running sum
        weights = np.zeros(20, np.float32)
        weights[:7] = np.random.default_rng(seed).random(7)

        assert place_of(weights, 1 - 2**-53) == 6


@given(
    hnp.arrays(np.float32, st.integers(1, 4 * STRIDE), elements=st.sampled_from([0.0, 0.1, 0.25, 1.0])),
    st.floats(0, 1, exclude_max=True),
)
def test_a_place_is_found_among_sums_as_a_running_sum_would_find_it(weights: Logits, share: float) -> None:
    if not weights.any():
        weights[-1] = 1.0
    place = place_of(weights, share)
    running = np.cumsum(weights, dtype=np.float64)

    assert weights[place] > 0
    assert running[place] >= share * running[-1] * (1 - 1e-6)
    assert place == 0 or running[place] - weights[place] <= share * running[-1] * (1 + 1e-6)


def draws(values: Logits, seed: int, count: int = 50, **params: float) -> list[int]:
    sampler = Sampler(SamplingParams(**params), seed)  # type: ignore[arg-type]  # test data
    return [sample(sampler, values)[0] for _ in range(count)]


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
    sample(filtered, wide)
    sample(plain, wide)

    assert plain._random.random() == filtered._random.random() == mixed._random.random()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(poison: float, temperature: float) -> None:
    with pytest.raises(FloatingPointError):
        Sampler(SamplingParams(temperature=temperature), 0).choose(logits(1, poison, 2))


# -- logprobs
def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    values = np.random.default_rng(3).normal(scale=4, size=300).astype(np.float32)
    token_id, logprobs = Sampler(SamplingParams(temperature=0.2, top_k=5, logprobs=20), 1).choose(values)
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
