"""Every outcome of a comparison, and what a run of them ends with."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.golden.compare import (
    Identical,
    NotJudged,
    Observed,
    Outcome,
    Regression,
    Unrecorded,
    compare,
    exit_code,
)
from tests.unit.test_golden_fixture import ANSWER, CHAT

SERVED = Observed(
    prompt_token_ids=CHAT.prompt_token_ids,
    token_ids=ANSWER.expected.token_ids,
    text=ANSWER.expected.text,
    finish_reason="stop",
    num_prompt_tokens=60,
    num_output_tokens=3,
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


@pytest.mark.parametrize("status", [401, 503])
def test_a_server_that_is_full_draining_or_wants_a_key_is_not_judged(status: int) -> None:
    assert isinstance(judge(status=status, error="draining"), NotJudged)


def test_without_ids_equal_text_is_identical_by_text_only() -> None:
    assert judge(token_ids=None, prompt_token_ids=None, num_prompt_tokens=None) == Identical("text")


def test_without_ids_another_text_cannot_be_classified() -> None:
    outcome = judge(token_ids=None, prompt_token_ids=None, text="London")

    assert isinstance(outcome, NotJudged)
    assert "cannot classify" in outcome.reason


def test_without_ids_another_finish_reason_is_still_a_regression() -> None:
    assert regression(token_ids=None, finish_reason="length").what == "finish reason"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_ids_are_identical_exactly_when_they_are_equal(ids: list[int]) -> None:
    outcome = judge(token_ids=tuple(ids))

    assert (outcome == Identical("ids")) == (tuple(ids) == ANSWER.expected.token_ids)


SAME, WORSE, NONE, UNSURE = Identical(), Regression("tokens", ""), Unrecorded("new device"), NotJudged("died")


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
    ],
)
def test_the_exit_code_is_that_of_the_worst_outcome(outcomes: list[Outcome], plain: int, required: int) -> None:
    assert (exit_code(outcomes, require=False), exit_code(outcomes, require=True)) == (plain, required)
