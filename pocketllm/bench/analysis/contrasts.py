"""From the samples of a run to its results: slot values, contrasts, checks, verdicts; pure, measures nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pocketllm.bench.analysis import conditions, stats, validity
from pocketllm.bench.analysis.slots import Table, medians, missing_blocks, missing_notes, quantile_notes, slot_table
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.analysis.verdict import Evidence, Floor, Verdict, judge, noise_floor
from pocketllm.bench.arm import Arm, ArmSet, Role
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import Slot

MIN_FIT_BLOCKS = 4
PROCESS = "process"


@dataclass(frozen=True)
class Question:
    """All that is fixed before the first slot."""

    scenario: Scenario
    arm_set: ArmSet
    slots: Sequence[Slot]
    margins: Mapping[str, float]
    null_history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """ln ratios of past null arms of this machine by metric; see `history.py`."""
    steady_start: bool | None = None
    """Whether a heat soak settled before the first slot (`conditions.steady`); None: none was made. V15 tells."""

    @property
    def blocks(self) -> int:
        return max(slot.block for slot in self.slots) + 1

    def margin(self, metric: str) -> float:
        """The margin of a metric, or that of its word at every point; a metric that is not judged has the widest."""
        own = self.margins.get(metric, self.margins.get(metric.partition("@")[0]))
        return max(self.margins.values()) if own is None else own

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
    bias: float
    """Of the null arm, where it is more than chance; see `verdict.Evidence`."""
    verdict: Verdict | None
    adjusted_p: float | None
    num_outliers: int
    flips: bool
    """Whether the word would be another without the marked outliers."""


@dataclass(frozen=True)
class Analysis:
    """What a run showed. `medians` is the cost by metric and arm."""

    results: tuple[Result, ...]
    checks: tuple[Check, ...]
    medians: Mapping[str, Mapping[str, float]]
    valid_blocks: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """Remarks on metrics, such as a quantile that the slots have too few requests for."""

    @property
    def broken(self) -> list[str]:
        """Rules that make the run INVALID."""
        return broken_rules(self.checks)

    @property
    def valid(self) -> bool:
        return not self.broken

    @property
    def null_valid(self) -> bool:
        """Whether the run is valid and had a null arm: then nothing that matters was found between A and A."""
        has_null = any(result.role is Role.NULL for result in self.results)
        return self.valid and has_null


def analyze(question: Question, measured: Sequence[Measured], extra: Sequence[Check] = ()) -> Analysis:
    """Everything that can be said once the last slot has ended."""
    scenario, names = question.scenario, question.arm_set.names
    checks = [*extra, *validity.sample_checks(measured, scenario.n_prompt, scenario.n_out, names)]
    checks += conditions.condition_checks(measured, scenario.primary)
    table = slot_table(scenario, measured)
    bad = validity.lost_blocks(checks) | missing_blocks(scenario, question.slots, table)
    valid = tuple(block for block in range(question.blocks) if block not in bad)
    checks += validity.too_few(len(valid), question.blocks)
    contrasts = make_contrasts(question, table, valid, starts_of(question, measured))
    checks += contrast_checks(question, contrasts)
    checks += conditions.unsteady(baseline_logs(question, table, valid), question.steady_start)
    results = judged(question, contrasts, broken_rules(checks))
    notes = (*missing_notes(scenario, question.slots, measured, table), *quantile_notes(scenario, measured))
    return Analysis(tuple(results), tuple(checks), medians(scenario, names, table, valid), valid, notes)


def interim(question: Question, measured: Sequence[Measured]) -> dict[tuple[str, str], stats.Fit]:
    """Fits by (metric, arm) over the whole blocks so far, for a progress line or `--until half-width=…`.

    To stop on them is sound at the end of a row set only, and on a half-width only; never on a word.
    """
    table = slot_table(question.scenario, measured)
    missing = missing_blocks(question.scenario, question.slots, table)
    valid = [block for block in range(question.blocks) if block not in missing]
    contrasts = make_contrasts(question, table, valid, starts_of(question, measured))
    return {(item.metric, item.arm): item.fit for item in contrasts}


def half_width(question: Question, measured: Sequence[Measured]) -> float | None:
    """The widest half of a 95 % interval among judged contrasts, as a share (0.01: ± 1 %); None before there is one."""
    fits = interim(question, measured)
    judged_arms = {arm.name for arm in question.arm_set.candidates} or set(question.arm_set.names)
    ends = [
        (low, high)
        for (metric, arm), fit in fits.items()
        if metric in question.scenario.primary and arm in judged_arms
        for low, high in [fit.interval()]
    ]
    return max(math.expm1(float(high - low) / 2) for low, high in ends) if ends else None


def starts_of(question: Question, measured: Sequence[Measured]) -> dict[int, int]:
    """The start of each block, where the start is the sample: `process` isolation with two starts or more.

    With one start the blocks are the sample, and a verdict speaks of these processes only.
    """
    starts = {item.block: item.start for item in measured}
    by_start = question.arm_set.isolation.value == PROCESS and len(set(starts.values())) > 1
    return starts if by_start else {}


def contrast_checks(question: Question, contrasts: Sequence["Contrast"]) -> list[Check]:
    """V05 of the null arm, V06 and V07 of every arm, on the judged metrics."""
    checks: list[Check] = []
    names, primary = question.arm_set.names, question.scenario.primary
    for item in contrasts:
        if item.metric not in primary:
            continue
        margin = question.margin(item.metric)
        if item.role is Role.NULL:
            checks += validity.null_check(item.metric, item.fit, margin, len(primary))
        checks += validity.order_checks(item.metric, item.arm, item.fit, len(names), margin)
    return checks


def broken_rules(checks: Sequence[Check]) -> list[str]:
    """Checks that take the whole run with them, as a reader is told of them."""
    return [f"{check.code} {check.detail}" for check in checks if check.severity is Severity.RUN]


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


def make_contrasts(question: Question, table: Table, valid: Sequence[int], starts: Mapping[int, int]) -> list[Contrast]:
    """One contrast a metric and arm that has a value in every valid block; none where blocks are too few to fit."""
    baseline = question.arm_set.baseline.name
    found = []
    for metric in question.metrics if len(valid) >= MIN_FIT_BLOCKS else ():
        for arm in question.arm_set.arms[1:]:
            keys = [(metric, block, name) for block in valid for name in (baseline, arm.name)]
            if all(key in table for key in keys):
                found.append(contrast(question, table, valid, metric, arm, starts))
    return found


def contrast(
    question: Question, table: Table, valid: Sequence[int], metric: str, arm: Arm, starts: Mapping[int, int]
) -> Contrast:
    """Fit one arm, and fit it again without the blocks that hold outliers."""
    baseline = question.arm_set.baseline.name
    logs = {name: np.log([table[metric, block, name] for block in valid]) for name in (arm.name, baseline)}
    marked = stats.outliers(logs[arm.name]) | stats.outliers(logs[baseline])
    outlying = tuple(block for block, mark in zip(valid, marked, strict=True) if mark)
    kept = [block for block in valid if block not in outlying]

    def estimate(blocks: Sequence[int], differences: stats.Array) -> tuple[stats.Fit, tuple[float, float, float]]:
        design = stats.make_design(question.slots, arm.name, baseline, blocks)
        labels = [starts[block] for block in blocks] if starts else []
        if len(set(labels)) < 2:
            return stats.fit(differences, design), stats.hodges_lehmann(differences)
        averages = stats.start_averages(differences, labels)
        return stats.fit_starts(differences, design, labels), stats.hodges_lehmann(averages)

    differences = logs[arm.name] - logs[baseline]
    fit, robust = estimate(valid, differences)
    # a start that is outlying as a whole cannot be left out: it is what a start can be
    enough = bool(outlying) and len(kept) >= MIN_FIT_BLOCKS and len({starts.get(b) for b in kept}) > min(len(starts), 1)
    without = estimate(kept, differences[~marked]) if enough else (None, None)
    return Contrast(metric, arm.name, arm.role, fit, robust, outlying, *without)


def judged(question: Question, contrasts: Sequence[Contrast], broken: Sequence[str]) -> list[Result]:
    """Results in the order of the contrasts; words for candidates on primary metrics, if a null arm ran."""
    nulls = {item.metric: item.fit for item in contrasts if item.role is Role.NULL}
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
    nulls: Mapping[str, stats.Fit],
    family: Sequence[Contrast],
    broken: Sequence[str],
) -> Result:
    """One contrast with its floor and word."""
    history = question.null_history.get(item.metric, ())
    null = nulls.get(item.metric)
    floor = None if null is None else noise_floor(float(null.estimate), history)
    bias = seen_bias(null, len(question.scenario.primary))
    margin = question.margin(item.metric)

    def verdict_of(fit: stats.Fit, robust: tuple[float, float, float]) -> Verdict | None:
        p = adjusted_p(family, item, fit)
        if floor is None or p is None:
            return None
        return judge(Evidence(fit, robust, p, len(family), margin, floor, broken, bias))

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
        bias=bias,
        verdict=verdict,
        adjusted_p=adjusted_p(family, item, item.fit),
        num_outliers=len(item.outlying),
        flips=verdict is not None and without is not None and without.word is not verdict.word,
    )


def seen_bias(null: stats.Fit | None, tests: int) -> float:
    """|ln ratio| of a null arm that differs by more than chance (V05); 0 otherwise."""
    return abs(float(null.estimate)) if null is not None and validity.is_seen(null, tests) else 0.0


def baseline_logs(question: Question, table: Table, valid: Sequence[int]) -> list[float]:
    """ln cost of the baseline in each valid block, on the first primary metric."""
    metric, name = question.scenario.primary[0], question.arm_set.baseline.name
    return [math.log(table[metric, block, name]) for block in valid if (metric, block, name) in table]
