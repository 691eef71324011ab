import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench.analysis.stats import Fit
from pocketllm.bench.analysis.verdict import Evidence, Floor, Require, Word, exit_code, judge, noise_floor


def fit(percent: float, se_percent: float, df: int = 9) -> Fit:
    estimate, se = math.log1p(percent / 100), se_percent / 100
    return Fit(np.array(estimate), np.array(se), df, df + 3, np.array(se), None, None, df, df + 3)


def evidence(percent: float, se_percent: float, df: int = 9, **changes: object) -> Evidence:
    """One candidate, margin 1 %, a quiet null arm, estimators that agree."""
    contrast = fit(percent, se_percent, df)
    low, high = (float(end) for end in contrast.interval())
    base = Evidence(
        fit=contrast,
        robust=(float(contrast.estimate), low, high),
        adjusted_p=float(contrast.p_value),
        tests=1,
        margin=0.01,
        floor=Floor(0.001, "this run's null arm"),
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("percent", "se", "word"),
    [
        (18.0, 0.3, Word.SLOWER),
        (-15.0, 0.3, Word.FASTER),
        (0.1, 0.2, Word.SAME),
        (0.0, 0.0, Word.SAME),
        (0.8, 0.3, Word.SMALL),
        (1.5, 0.4, Word.SMALL),
        (1.5, 1.5, Word.NOT_DISTINGUISHABLE),
        (0.0, 2.0, Word.NOT_DISTINGUISHABLE),
    ],
)
def test_the_first_rule_that_holds_gives_the_word(percent: float, se: float, word: Word) -> None:
    assert judge(evidence(percent, se)).word is word


def test_a_broken_rule_comes_before_any_ratio() -> None:
    verdict = judge(evidence(18.0, 0.3, invalid=["V05 the null arm differs"]))

    assert (verdict.word, verdict.reason) == (Word.INVALID, "V05 the null arm differs")


@pytest.mark.parametrize(
    "changes",
    [
        {"adjusted_p": 0.06},
        {"floor": Floor(0.2, "history")},
        {"tests": 10_000_000},
    ],
    ids=["holm", "floor", "bonferroni"],
)
def test_slower_needs_holm_the_bonferroni_interval_and_the_floor_all_three(changes: dict[str, object]) -> None:
    assert judge(evidence(3.0, 0.3)).word is Word.SLOWER
    assert judge(evidence(3.0, 0.3, **changes)).word is Word.SMALL


def test_what_the_instrument_sees_between_a_and_a_counts_against_every_word() -> None:
    biased = math.log1p(0.004)

    assert judge(evidence(2.0, 0.3)).word is Word.SLOWER
    assert judge(evidence(2.0, 0.3, bias=biased)).word is Word.SMALL
    assert judge(evidence(3.0, 0.3, bias=biased)).word is Word.SLOWER
    assert judge(evidence(-3.0, 0.3, bias=biased)).word is Word.FASTER
    assert judge(evidence(0.4, 0.2)).word is Word.SAME
    assert judge(evidence(0.4, 0.2, bias=biased)).word is not Word.SAME
    assert judge(evidence(0.1, 0.2)).reason == "the 90 % interval lies inside ±0.01 of 1"
    verdict = judge(evidence(0.1, 0.2, bias=biased))
    assert (verdict.word, verdict.reason) == (Word.SAME, "the 90 % interval lies inside ±0.006 of 1")
    assert "beyond the margin and what the null arm showed" in judge(evidence(3.0, 0.3, bias=biased)).reason


def test_same_is_never_widened_by_the_noise_floor() -> None:
    assert judge(evidence(3.0, 0.3, floor=Floor(0.5, "history"))).word is not Word.SAME


@pytest.mark.parametrize("robust", [(0.03, -0.01, 0.06), (-0.03, -0.06, -0.01)], ids=["on zero", "in sign"])
def test_estimators_that_disagree_are_not_distinguishable(robust: tuple[float, float, float]) -> None:
    verdict = judge(evidence(3.0, 0.3, robust=robust))

    assert verdict.word is Word.NOT_DISTINGUISHABLE
    assert "disagree" in verdict.reason


def test_estimators_that_disagree_are_not_the_same_either() -> None:
    assert judge(evidence(0.1, 0.2)).word is Word.SAME
    assert judge(evidence(0.1, 0.2, robust=(0.002, 0.0001, 0.004))).word is Word.NOT_DISTINGUISHABLE


@pytest.mark.parametrize(
    ("middle", "word"), [(0.03, Word.SLOWER), (-0.001, Word.NOT_DISTINGUISHABLE)], ids=["same sign", "other sign"]
)
def test_few_starts_are_cross_checked_by_sign(middle: float, word: Word) -> None:
    assert judge(evidence(3.0, 0.3, df=4, robust=(middle, -math.inf, math.inf))).word is word


@given(percent=st.floats(-50, 100), se=st.floats(0.01, 20))
def test_faster_and_slower_are_mirror_images(percent: float, se: float) -> None:
    mirror = {Word.FASTER: Word.SLOWER, Word.SLOWER: Word.FASTER}
    there = judge(evidence(percent, se)).word
    back = judge(evidence(100 * (1 / (1 + percent / 100) - 1), se)).word

    assert back is mirror.get(there, there)


def test_the_floor_is_this_runs_null_until_eight_past_ones_say_more() -> None:
    past = [0.001 * n for n in range(1, 11)]

    assert noise_floor(-0.002, past[:7]) == Floor(0.002, "this run's null arm")
    assert noise_floor(-0.002, past).value == pytest.approx(0.009)
    assert "10 past null arms" in noise_floor(-0.002, past).source
    assert noise_floor(0.05, past).value == 0.05


@pytest.mark.parametrize(
    ("words", "fail_on_slower", "require", "code"),
    [
        ([(Word.SLOWER, 0.2, 0.01)], False, None, 0),
        ([(Word.SLOWER, 0.2, 0.01)], True, None, 1),
        ([(Word.SLOWER, 0.2, 0.01)], False, Require.SAME_OR_FASTER, 1),
        ([(Word.NOT_DISTINGUISHABLE, 0.03, 0.01)], False, None, 0),
        ([(Word.NOT_DISTINGUISHABLE, 0.03, 0.01)], True, None, 0),
        ([(Word.NOT_DISTINGUISHABLE, 0.03, 0.01)], False, Require.SAME_OR_FASTER, 4),
        ([(Word.SMALL, 0.009, 0.01), (Word.FASTER, -0.1, 0.01)], True, Require.SAME_OR_FASTER, 0),
        ([(Word.SAME, 0.004, 0.01)], False, Require.SAME_OR_FASTER, 0),
        ([(Word.INVALID, 0.0, 0.01), (Word.SLOWER, 0.2, 0.01)], True, Require.SAME_OR_FASTER, 3),
        ([], False, None, 0),
    ],
)
def test_exit_codes(
    words: list[tuple[Word, float, float]], fail_on_slower: bool, require: Require | None, code: int
) -> None:
    assert exit_code(words, fail_on_slower, require) == code
