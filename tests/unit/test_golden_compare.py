"""Every outcome of a comparison, and what a run of them ends with."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.errors import NotJudgedError
from pocketllm.golden.compare import (
    LARGEST_TAU,
    LEAST_DRIFT,
    LEAST_TAU,
    WORDS,
    Diverged,
    Drift,
    Identical,
    NotJudged,
    Observed,
    Outcome,
    Regression,
    Shift,
    Stale,
    Tie,
    Unrecorded,
    compare,
    exit_code,
    shift,
    tau,
)
from pocketllm.golden.fixture import Answer, Case, Floor, Noise, Position
from pocketllm.golden.judging.ties import settle
from pocketllm.golden.judging.words import describe, explain
from tests.unit.test_golden_fixture import ANSWER, CHAT

SERVED = Observed(
    prompt_token_ids=CHAT.prompt_token_ids,
    token_ids=ANSWER.expected.token_ids,
    text=ANSWER.expected.text,
    finish_reason="stop",
    num_prompt_tokens=60,
    num_output_tokens=3,
    logprobs=(-0.1, -0.5, -0.3),
)


def judge(unstreamed_text: str | None = None, **changes: Any) -> Outcome:
    return compare(CHAT, ANSWER, replace(SERVED, **changes), unstreamed_text)


def regression(**changes: Any) -> Regression:
    outcome = judge(**changes)
    assert isinstance(outcome, Regression), outcome
    return outcome


def test_the_recorded_answer_is_identical() -> None:
    assert judge() == Identical("ids")
    assert judge(unstreamed_text=SERVED.text) == Identical("ids")


def test_another_token_is_a_regression_with_its_margin_and_regret() -> None:
    found = regression(token_ids=(5, 8, 7))

    assert (found.what, found.position, found.expected, found.got) == ("tokens", 1, 6, 8)
    assert found.margin == 0.25
    assert found.regret == pytest.approx(0.25)


def test_a_token_outside_the_recorded_top_has_infinite_regret() -> None:
    assert regression(token_ids=(5, 99, 7)).regret == math.inf


def test_an_answer_that_ends_early_diverges_where_it_ends() -> None:
    found = regression(token_ids=(5, 6), num_output_tokens=2, finish_reason="length", text="Par")

    assert (found.what, found.position, found.expected, found.got, found.regret) == ("tokens", 2, 7, None, None)
    assert "finish reason length, not stop" in found.detail


def test_an_answer_that_goes_on_diverges_after_the_recorded_end() -> None:
    found = regression(token_ids=(5, 6, 7, 8))

    assert (found.position, found.expected, found.got, found.margin) == (3, None, 8, None)


def test_a_sampled_divergence_has_no_regret() -> None:
    sampled = replace(CHAT, sampling={**CHAT.sampling, "temperature": 0.8, "seed": 1})

    found = compare(sampled, ANSWER, replace(SERVED, token_ids=(5, 8, 7)))

    assert isinstance(found, Regression)
    assert (found.position, found.regret) == (1, None)


def test_another_prompt_is_named_before_the_tokens_are_looked_at() -> None:
    prompt = (*CHAT.prompt_token_ids[:10], 0, *CHAT.prompt_token_ids[11:])

    found = regression(prompt_token_ids=prompt, token_ids=(1, 2), text="nothing alike")

    assert (found.what, found.position, found.expected, found.got) == ("prompt ids", 10, 110, 0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"status": 400, "error": "too long"}, "status"),
        ({"status": 500}, "status"),
        ({"error": "the stream ended without [DONE]"}, "schema"),
        ({"finish_reason": "length"}, "finish reason"),
        ({"finish_reason": None}, "finish reason"),
        ({"num_prompt_tokens": 61}, "usage"),
        ({"num_output_tokens": 4}, "usage"),
        ({"text": "Par\nis"}, "text"),
        ({"text": ""}, "text"),
    ],
)
def test_each_fact_of_the_served_path_is_checked(changes: dict[str, Any], what: str) -> None:
    assert regression(**changes).what == what


def test_a_stream_that_reads_otherwise_than_the_whole_answer_is_a_regression() -> None:
    assert regression(unstreamed_text="Paris").what == "stream text"


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_server_that_is_full_draining_wants_a_key_or_has_no_such_model_is_not_judged(status: int) -> None:
    assert isinstance(judge(status=status, error="draining"), NotJudged)


def test_without_ids_equal_text_is_identical_by_text_only() -> None:
    assert judge(token_ids=None, prompt_token_ids=None, num_prompt_tokens=None) == Identical("text")


def test_without_ids_another_text_cannot_be_classified() -> None:
    outcome = judge(token_ids=None, prompt_token_ids=None, text="London")

    assert isinstance(outcome, Diverged)
    assert "cannot classify" in outcome.reason


def test_without_ids_another_finish_reason_is_still_a_regression() -> None:
    assert regression(token_ids=None, finish_reason="length").what == "finish reason"


# -- logprobs ----------------------------------------------------------------------------------------------------------
def test_equal_ids_with_other_logprobs_are_a_drift() -> None:
    outcome = judge(logprobs=(-0.1, -0.52, -0.3))

    assert isinstance(outcome, Drift)
    assert outcome.shift.p99 == pytest.approx(0.02, rel=0.03)
    assert outcome.limit == Shift(LEAST_DRIFT, LEAST_DRIFT)


@pytest.mark.parametrize("logprobs", [None, (-0.1, -0.5, -0.3), (-0.1005, -0.5005, -0.3)])
def test_logprobs_within_the_noise_are_no_drift(logprobs: Any) -> None:
    assert judge(logprobs=logprobs) == Identical("ids")


def test_a_logprob_that_is_no_number_is_a_drift() -> None:
    assert isinstance(judge(logprobs=(-0.1, math.nan, -0.3)), Drift)


def test_a_noisy_record_allows_three_times_its_own_noise() -> None:
    noisy = replace(ANSWER, noise=Noise(3, True, ("scored",), Floor(0.01, 0.02)))

    within = compare(CHAT, noisy, replace(SERVED, logprobs=(-0.12, -0.52, -0.32)))
    beyond = compare(CHAT, noisy, replace(SERVED, logprobs=(-0.14, -0.54, -0.34)))

    assert within == Identical("ids")
    assert isinstance(beyond, Drift)
    assert (beyond.limit.mean, beyond.limit.p99) == (pytest.approx(0.03), pytest.approx(0.06))


def test_text_complaints_come_before_a_drift() -> None:
    assert regression(logprobs=(-0.1, -0.9, -0.3), text="Par").what == "text"


@pytest.mark.parametrize(
    ("floor", "reference", "expected"),
    [(0.0, None, LEAST_TAU), (0.01, None, 0.02), (0.001, 0.01, 0.02), (0.2, None, LARGEST_TAU)],
)
def test_tau_is_twice_the_recorded_p99_within_its_bounds(
    floor: float, reference: float | None, expected: float
) -> None:
    noise = Noise(3, True, (), Floor(0.0, floor), None if reference is None else Floor(0.0, reference))

    assert tau(noise) == pytest.approx(expected)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50))
def test_the_shift_lies_between_nothing_and_the_largest_difference(differences: list[float]) -> None:
    found, largest = shift(differences), max(map(abs, differences))

    assert 0 <= found.mean <= largest + 1e-12
    assert 0 <= found.p99 <= largest + 1e-12


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_ids_are_identical_exactly_when_they_are_equal(ids: list[int]) -> None:
    outcome = judge(token_ids=tuple(ids), logprobs=None)

    assert (outcome == Identical("ids")) == (tuple(ids) == ANSWER.expected.token_ids)


SAME, WORSE, NONE, UNSURE = Identical(), Regression("tokens", ""), Unrecorded("new device"), NotJudged("died")
TIED, MOVED = Tie((3,), 1e-6, 1e-6, 2e-5), Drift(Shift(1.0, 1.0), Shift(0.1, 0.1))
OTHER, OLD = Diverged("a draw"), Stale("no case")


@pytest.mark.parametrize(
    ("outcomes", "plain", "required"),
    [
        ([SAME, SAME], 0, 0),
        ([SAME, WORSE], 1, 1),
        ([UNSURE, WORSE, NONE], 1, 1),
        ([SAME, UNSURE], 3, 3),
        ([NONE, UNSURE], 3, 3),
        ([SAME, NONE], 0, 4),
        ([NONE], 0, 4),
        ([], 0, 4),
        ([SAME, TIED], 0, 0),
        ([SAME, MOVED], 1, 1),
        ([SAME, OTHER], 1, 1),
        ([SAME, OLD], 0, 0),
        ([OLD], 0, 4),
    ],
)
def test_the_exit_code_is_that_of_the_worst_outcome(outcomes: list[Outcome], plain: int, required: int) -> None:
    assert (exit_code(outcomes, require=False), exit_code(outcomes, require=True)) == (plain, required)


def test_a_tie_and_a_stale_file_fail_only_where_that_is_asked_for() -> None:
    assert exit_code([SAME, TIED], False, strict_ties=True) == 1
    assert exit_code([SAME, OLD], False, reject_stale=True) == 5
    assert exit_code([WORSE, OLD], False, reject_stale=True) == 1


# -- ties --------------------------------------------------------------------------------------------------------------
CLOSE = replace(
    ANSWER,
    expected=replace(ANSWER.expected, token_ids=(5, 6, 7, 4), num_output_tokens=4),
    positions=(
        Position(-0.1, 2.0, (5, 9), (-0.1, -2.1)),
        Position(-0.7, 1e-5, (6, 8), (-0.7, -0.70001)),
        Position(-0.3, 1.0, (7, 2), (-0.3, -1.3)),
        Position(-0.6, 1e-5, (4, 3), (-0.6, -0.60001)),
    ),
)


def turned_over(
    *served: int, answer: Answer = CLOSE, resumed: Observed | Exception | None = None, case: Case = CHAT, **changes: Any
) -> tuple[Outcome, list[tuple[tuple[int, ...], int]]]:
    """The settled outcome of other tokens, and what the model was asked to go on from."""
    asked: list[tuple[tuple[int, ...], int]] = []

    def resume(of: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        asked.append((token_ids[len(case.prompt_token_ids) :], max_tokens))
        if isinstance(resumed, Exception):
            raise resumed
        rest = answer.expected.token_ids[-max_tokens:]
        return resumed or Observed(token_ids=rest, logprobs=(-0.3, -0.6)[-len(rest) :])

    logprobs = tuple(position.logprob for position in answer.positions)
    observed = replace(
        SERVED, **{"token_ids": served, "num_output_tokens": len(served), "logprobs": logprobs} | changes
    )
    return settle(case, answer, observed, compare(case, answer, observed), resume), asked


def test_a_turned_over_tie_is_a_tie_when_the_rest_comes_back_after_the_recorded_token() -> None:
    outcome, asked = turned_over(5, 8, 1, 1)

    assert isinstance(outcome, Tie)
    assert outcome.positions == (1,)
    assert asked == [((5, 6), 2)]


def test_a_tie_at_the_last_token_needs_no_question() -> None:
    outcome, asked = turned_over(5, 6, 7, 3)

    assert (isinstance(outcome, Tie), asked) == (True, [])


def test_two_ties_are_followed_one_after_the_other() -> None:
    outcome, asked = turned_over(5, 8, 1, 1, resumed=Observed(token_ids=(7, 3), logprobs=(-0.3, -0.6)))

    assert isinstance(outcome, Tie)
    assert (outcome.positions, len(asked)) == ((1, 3), 1)


def test_a_clear_token_turned_over_is_a_regression() -> None:
    outcome, asked = turned_over(9, 8, 1, 1)

    assert isinstance(outcome, Regression)
    assert (outcome.position, outcome.margin, asked) == (0, 2.0, [])


def test_a_token_that_was_never_near_is_a_regression_whatever_the_margin() -> None:
    outcome, _ = turned_over(5, 99, 1, 1)

    assert isinstance(outcome, Regression)
    assert outcome.regret == math.inf


def test_another_rest_after_a_tie_is_a_regression_that_names_the_tie() -> None:
    outcome, _ = turned_over(5, 8, 1, 1, resumed=Observed(token_ids=(2, 4), logprobs=(-0.3, -0.6)))

    assert isinstance(outcome, Regression)
    assert (outcome.position, outcome.detail) == (2, "after a tie at 1")


def test_other_logprobs_beside_a_tie_are_a_drift() -> None:
    outcome, _ = turned_over(5, 8, 1, 1, resumed=Observed(token_ids=(7, 4), logprobs=(-0.4, -0.6)))

    assert isinstance(outcome, Drift)


def test_more_than_three_ties_in_64_tokens_are_a_regression() -> None:
    even = Position(-0.7, 1e-5, (6, 8), (-0.7, -0.70001))
    shaky = replace(
        CLOSE, expected=replace(CLOSE.expected, token_ids=(6,) * 5, num_output_tokens=5), positions=(even,) * 5
    )

    def resume(case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        return Observed(token_ids=(8, *(6,) * (max_tokens - 1)), logprobs=(-0.7,) * max_tokens)

    observed = replace(SERVED, token_ids=(8,) * 5, num_output_tokens=5, logprobs=(-0.7,) * 5)
    outcome = settle(CHAT, shaky, observed, compare(CHAT, shaky, observed), resume)

    assert isinstance(outcome, Regression)
    assert "more than 3 ties" in outcome.detail


def test_without_logprobs_or_by_a_draw_nothing_is_a_tie() -> None:
    sampled = replace(CHAT, sampling={**CHAT.sampling, "temperature": 0.8, "seed": 1})

    for outcome, asked in (
        turned_over(5, 8, 1, 1, logprobs=None),
        turned_over(5, 8, 1, 1, case=sampled),
        turned_over(5, 8, 1, 1, answer=replace(CLOSE, positions=())),
    ):
        assert isinstance(outcome, Diverged)
        assert (outcome.position, outcome.expected, outcome.got, asked) == (1, 6, 8, [])


def test_a_tie_that_cannot_be_followed_is_not_called_one() -> None:
    died, _ = turned_over(5, 8, 1, 1, resumed=NotJudgedError("it died"))
    refused, _ = turned_over(5, 8, 1, 1, resumed=Observed(status=400, error="no token ids here"))

    assert isinstance(died, NotJudged)
    assert isinstance(refused, Diverged)
    assert "no token ids here" in refused.reason


def test_another_prompt_length_is_no_tie() -> None:
    assert isinstance(turned_over(5, 8, 1, 1, num_prompt_tokens=61)[0], Regression)


@pytest.mark.parametrize("outcome", [SAME, TIED, WORSE, MOVED, OTHER, NONE, UNSURE, OLD], ids=lambda one: one.word)
def test_every_outcome_can_be_told(outcome: Outcome) -> None:
    assert outcome.word in WORDS
    assert describe(outcome) or isinstance(outcome, Identical)
    assert explain(outcome, str) or isinstance(outcome, Identical)
