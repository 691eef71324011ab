"""From the samples of a run to its results: slot values, contrasts, checks, verdicts; pure, measures nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pocketllm.bench.analysis import stats, validity
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.analysis.verdict import Evidence, Floor, Verdict, judge, noise_floor
from pocketllm.bench.arm import ArmSet, Role
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import Slot
from pocketllm.bench.targets.contract import slot_costs

MIN_FIT_BLOCKS = 4


@dataclass(frozen=True)
class Question:
    """All that is fixed before the first slot."""

    scenario: Scenario
    arm_set: ArmSet
    slots: Sequence[Slot]
    margins: Mapping[str, float]
    null_history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """|ln ratio| of past null arms of this machine by metric."""

    @property
    def blocks(self) -> int:
        return max(slot.block for slot in self.slots) + 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.scenario.primary, *self.scenario.also)


@dataclass(frozen=True)
class Result:
    """One arm against the baseline on one metric; `verdict` is None for the null arm, an `also` metric, or no null."""

    metric: str
    arm: str
    role: Role
    fit: stats.Fit
    robust: tuple[float, float, float]
    margin: float
    floor: Floor | None
    verdict: Verdict | None
    adjusted_p: float | None
    num_outliers: int
    flips: bool
    """Whether the word would be another without the marked outliers."""


@dataclass(frozen=True)
class Analysis:
    """What a run showed. `medians` is seconds per token by metric and arm."""

    results: tuple[Result, ...]
    checks: tuple[Check, ...]
    medians: Mapping[str, Mapping[str, float]]
    valid_blocks: tuple[int, ...]

    @property
    def broken(self) -> list[str]:
        """Rules that make the run INVALID."""
        return broken_rules(self.checks)

    @property
    def valid(self) -> bool:
        return not self.broken

    @property
    def null_valid(self) -> bool:
        """Whether the run is valid and had a null arm: then nothing was found between A and A."""
        has_null = any(result.role is Role.NULL for result in self.results)
        return self.valid and has_null


def analyze(question: Question, measured: Sequence[Measured], extra: Sequence[Check] = ()) -> Analysis:
    """Everything that can be said once the last slot has ended."""
    scenario, names = question.scenario, question.arm_set.names
    checks = [*extra, *validity.sample_checks(measured, scenario.n_prompt, scenario.n_out, names)]
    table = slot_table(question, measured)
    bad = validity.bad_blocks(measured) | missing_blocks(question, table)
    valid = tuple(block for block in range(question.blocks) if block not in bad)
    checks += validity.too_few(len(valid), question.blocks)
    contrasts = make_contrasts(question, table, valid) if len(valid) >= MIN_FIT_BLOCKS else []
    for contrast in contrasts:
        if contrast.metric in scenario.primary:
            if contrast.role is Role.NULL:
                checks += validity.null_check(contrast.metric, contrast.fit)
            margin = question.margins[contrast.metric]
            checks += validity.order_checks(contrast.metric, contrast.arm, contrast.fit, len(names), margin)
    checks.append(validity.unsteady(baseline_logs(question, table, valid)))
    results = judged(question, contrasts, broken_rules(checks))
    return Analysis(tuple(results), tuple(checks), medians(question, table, valid), valid)


def broken_rules(checks: Sequence[Check]) -> list[str]:
    """Checks that take the whole run with them, as a reader is told of them."""
    return [f"{check.code} {check.detail}" for check in checks if check.severity is Severity.RUN]


Table = dict[tuple[str, int, str], float]
"""Seconds per token by (metric, block, arm)."""


def slot_table(question: Question, measured: Sequence[Measured]) -> Table:
    """The value of every slot and metric: the median over its requests."""
    grouped: dict[tuple[int, str], list[Any]] = {}
    for item in measured:
        grouped.setdefault((item.block, item.arm), []).append(item.sample)
    return {
        (metric, block, arm): cost
        for (block, arm), samples in grouped.items()
        for metric, cost in slot_costs(samples).items()
        if metric in question.metrics
    }


def missing_blocks(question: Question, table: Table) -> set[int]:
    """Blocks in which an arm has no value for a primary metric."""
    wanted = ((metric, slot.block, slot.arm) for slot in question.slots for metric in question.scenario.primary)
    return {key[1] for key in wanted if key not in table}


@dataclass(frozen=True)
class Contrast:
    """The numbers of one arm against the baseline on one metric, before anything is judged."""

    metric: str
    arm: str
    role: Role
    fit: stats.Fit
    robust: tuple[float, float, float]
    outlying: tuple[int, ...]
    """Valid blocks with an outlier in either arm."""
    fit_without: stats.Fit | None
    robust_without: tuple[float, float, float] | None


def make_contrasts(question: Question, table: Table, valid: Sequence[int]) -> list[Contrast]:
    """One contrast a metric and arm that has a value in every valid block."""
    baseline = question.arm_set.baseline.name
    found = []
    for metric in question.metrics:
        for arm in question.arm_set.arms[1:]:
            keys = [(metric, block, name) for block in valid for name in (baseline, arm.name)]
            if all(key in table for key in keys):
                found.append(contrast(question, table, valid, metric, arm.name))
    return found


def contrast(question: Question, table: Table, valid: Sequence[int], metric: str, arm: str) -> Contrast:
    """Fit one arm, and fit it again without the blocks that hold outliers."""
    baseline = question.arm_set.baseline.name
    logs = {name: np.log([table[metric, block, name] for block in valid]) for name in (arm, baseline)}
    marked = stats.outliers(logs[arm]) | stats.outliers(logs[baseline])
    outlying = tuple(block for block, mark in zip(valid, marked, strict=True) if mark)
    kept = [block for block in valid if block not in outlying]

    def estimate(blocks: Sequence[int], differences: stats.Array) -> stats.Fit:
        return stats.fit(differences, stats.make_design(question.slots, arm, baseline, blocks))

    differences = logs[arm] - logs[baseline]
    enough = bool(outlying) and len(kept) >= MIN_FIT_BLOCKS
    role = next(item.role for item in question.arm_set.arms if item.name == arm)
    return Contrast(
        metric=metric,
        arm=arm,
        role=role,
        fit=estimate(valid, differences),
        robust=stats.hodges_lehmann(differences),
        outlying=outlying,
        fit_without=estimate(kept, differences[~marked]) if enough else None,
        robust_without=stats.hodges_lehmann(differences[~marked]) if enough else None,
    )


def judged(question: Question, contrasts: Sequence[Contrast], broken: Sequence[str]) -> list[Result]:
    """Results in the order of the contrasts; words for candidates on primary metrics, if a null arm ran."""
    nulls = {item.metric: float(item.fit.estimate) for item in contrasts if item.role is Role.NULL}
    family = [item for item in contrasts if item.role is Role.CANDIDATE and item.metric in question.scenario.primary]
    return [result_of(question, item, nulls, family, broken) for item in contrasts]


def adjusted_p(family: Sequence[Contrast], item: Contrast, fit: stats.Fit) -> float | None:
    """Holm's p of one contrast within its family, were `fit` its fit; None outside the family."""
    places = [place for place, other in enumerate(family) if other is item]
    p_values = [float(fit.p_value if other is item else other.fit.p_value) for other in family]
    return stats.holm(p_values)[places[0]] if places else None


def result_of(
    question: Question,
    item: Contrast,
    nulls: Mapping[str, float],
    family: Sequence[Contrast],
    broken: Sequence[str],
) -> Result:
    """One contrast with its floor and word."""
    history = question.null_history.get(item.metric, ())
    floor = noise_floor(nulls[item.metric], history) if item.metric in nulls else None
    margin = question.margins.get(item.metric, max(question.margins.values()))

    def verdict_of(fit: stats.Fit, robust: tuple[float, float, float]) -> Verdict | None:
        p = adjusted_p(family, item, fit)
        if floor is None or p is None:
            return None
        return judge(Evidence(fit, robust, p, len(family), margin, floor, broken))

    verdict = verdict_of(item.fit, item.robust)
    without = None
    if item.fit_without is not None and item.robust_without is not None:
        without = verdict_of(item.fit_without, item.robust_without)
    return Result(
        metric=item.metric,
        arm=item.arm,
        role=item.role,
        fit=item.fit,
        robust=item.robust,
        margin=margin,
        floor=floor,
        verdict=verdict,
        adjusted_p=adjusted_p(family, item, item.fit),
        num_outliers=len(item.outlying),
        flips=verdict is not None and without is not None and without.word is not verdict.word,
    )


def baseline_logs(question: Question, table: Table, valid: Sequence[int]) -> list[float]:
    """ln cost of the baseline in each valid block, on the first primary metric."""
    metric, name = question.scenario.primary[0], question.arm_set.baseline.name
    return [math.log(table[metric, block, name]) for block in valid if (metric, block, name) in table]


def medians(question: Question, table: Table, valid: Sequence[int]) -> dict[str, dict[str, float]]:
    """Median seconds per token over the valid blocks, by metric and arm."""
    found: dict[str, dict[str, float]] = {}
    for metric in question.metrics:
        for name in question.arm_set.names:
            values = [table[metric, block, name] for block in valid if (metric, block, name) in table]
            if values:
                found.setdefault(metric, {})[name] = float(np.median(values))
    return found
