"""From a contrast to a word: INVALID, FASTER or SLOWER, SAME, SMALL, NOT DISTINGUISHABLE; pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pocketllm.bench.analysis.stats import Fit, bonferroni_level
from pocketllm.bench.arm.settings import Isolation

DEFAULT_MARGINS = {Isolation.TOGGLE: 0.01, Isolation.PROCESS: 0.02, Isolation.ATTACH: 0.02}
MIN_HISTORY = 8
OWN_FLOOR = "this run's null arm"
"""The source of a noise floor that does not come from past runs."""
ALPHA = 0.05
EQUIVALENCE_LEVEL = 0.90


class Word(Enum):
    """What may be said of an arm against the baseline."""

    INVALID = "INVALID"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    SMALL = "SMALL"
    NOT_DISTINGUISHABLE = "NOT DISTINGUISHABLE"


class Require(Enum):
    """What `--require` may ask for."""

    SAME_OR_FASTER = "same-or-faster"


@dataclass(frozen=True)
class Verdict:
    """A word and why, in the words of the rule that gave it."""

    word: Word
    reason: str


@dataclass(frozen=True)
class Floor:
    """Noise floor |ln ratio| of A against A, and which of the two gave it."""

    value: float
    source: str


@dataclass(frozen=True)
class Evidence:
    """All that a verdict on one contrast reads; logs of time ratios throughout."""

    fit: Fit
    robust: tuple[float, float, float]
    """Hodges–Lehmann estimate and interval, unadjusted."""
    adjusted_p: float
    tests: int
    margin: float
    """Relative, e.g. 0.01."""
    floor: Floor
    invalid: Sequence[str] = ()
    """Validity rules that broke for the whole run."""
    bias: float = 0.0
    """|ln ratio| of A against A where it is more than chance: what the instrument itself may add to an arm or take."""


def noise_floor(null_estimate: float, history: Sequence[float]) -> Floor:
    """max(|θ̂| of this run's null arm, 90th percentile of past |θ̂|), the latter only with ≥ 8 of them."""
    here = abs(null_estimate)
    if len(history) >= MIN_HISTORY:
        past = sorted(abs(value) for value in history)
        rank = min(len(past) - 1, math.ceil(0.9 * len(past)) - 1)
        if past[rank] > here:
            return Floor(past[rank], f"90th percentile of {len(past)} past null arms")
    return Floor(here, OWN_FLOOR)


def judge(evidence: Evidence) -> Verdict:
    """First rule that holds, in the order of the words."""
    if evidence.invalid:
        return Verdict(Word.INVALID, "; ".join(evidence.invalid))
    fit, edge = evidence.fit, math.log1p(evidence.margin)
    estimate = float(fit.estimate)
    low, high = (float(end) for end in fit.interval())
    if not estimators_agree(evidence, low, high):
        return Verdict(Word.NOT_DISTINGUISHABLE, "the two estimators disagree")
    if is_beyond(evidence, edge + evidence.bias):
        word = Word.SLOWER if estimate > 0 else Word.FASTER
        seen = " and what the null arm showed" if evidence.bias else ""
        return Verdict(word, f"the interval lies beyond the margin{seen} and the difference beyond the noise floor")
    inner_low, inner_high = (float(end) for end in fit.interval(EQUIVALENCE_LEVEL))
    inner_edge = edge - evidence.bias
    if -inner_edge < inner_low and inner_high < inner_edge:
        return Verdict(Word.SAME, f"the 90 % interval lies inside ±{math.expm1(inner_edge):.2g} of 1")
    if low > 0 or high < 0:
        return Verdict(Word.SMALL, "a difference, but below what this rig can defend")
    return Verdict(Word.NOT_DISTINGUISHABLE, "the interval holds both no difference and one that matters")


def is_beyond(evidence: Evidence, edge: float) -> bool:
    """Holm p, the whole Bonferroni interval beyond the margin, and the estimate beyond the floor: all three."""
    low, high = (float(end) for end in evidence.fit.interval(bonferroni_level(evidence.tests)))
    outside = low > edge or high < -edge
    return evidence.adjusted_p < ALPHA and outside and abs(float(evidence.fit.estimate)) > evidence.floor.value


def estimators_agree(evidence: Evidence, low: float, high: float) -> bool:
    """Whether t and signed-rank intervals both exclude 0 on the same side, or both hold it.

    Below 7 observations (starts) there is no signed-rank interval: then the Hodges–Lehmann estimate must have the sign
    of an interval that excludes 0.
    """

    def side(bottom: float, top: float) -> int:
        return 1 if bottom > 0 else -1 if top < 0 else 0

    middle, bottom, top = evidence.robust
    if math.isinf(bottom):
        return side(low, high) * middle >= 0
    return side(low, high) == side(bottom, top)


def exit_code(
    verdicts: Sequence[tuple[Word, float, float]], fail_on_slower: bool = False, require: Require | None = None
) -> int:
    """Exit code of a run from each candidate's (word, `slowest` time ratio − 1, margin).

    3 INVALID · 1 a gate says SLOWER · 4 under-powered under `--require` · 0 otherwise.
    """
    words = [word for word, _, _ in verdicts]
    if Word.INVALID in words:
        return 3
    gated = fail_on_slower or require is not None
    if gated and any(is_slower(word) for word in words):
        return 1
    if require is Require.SAME_OR_FASTER and any(upper >= margin for _, upper, margin in verdicts):
        return 4
    return 0


def slowest(result: Mapping[str, Any]) -> float:
    """The largest time ratio − 1 that a recorded result leaves open: the interval's end and the bias that was seen."""
    return float(result["high"]) * (1 + float(result.get("bias", 0.0))) - 1


def is_slower(word: Word) -> bool:
    """Whether a gate against slowness says no to this word."""
    match word:
        case Word.SLOWER:
            return True
        case Word.INVALID | Word.FASTER | Word.SAME | Word.SMALL | Word.NOT_DISTINGUISHABLE:
            return False
