"""The validity rules V01…V15: each with its value, and how far it reaches; pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pocketllm.bench.analysis.stats import NULL_LEVEL, Fit, two_sided_p
from pocketllm.bench.schedule import DEFAULT_BLOCKS, MIN_BLOCKS
from pocketllm.bench.targets.contract import Sample


class Severity(Enum):
    """What a broken rule takes with it."""

    RUN = "run"
    BLOCK = "block"
    NOTE = "note"


@dataclass(frozen=True)
class Check:
    """One rule that did not hold (or a remark that readers need): its value and what was seen."""

    code: str
    severity: Severity
    value: float | None
    detail: str


@dataclass(frozen=True)
class Measured:
    """One measured request and where it stood."""

    block: int
    arm: str
    sample: Sample


def sample_checks(measured: Sequence[Measured], n_prompt: int, n_out: int, arms: Sequence[str]) -> list[Check]:
    """V01 request errors, V02 lengths and finish reasons, V03 empty successes, V04 cached tokens."""
    checks = [*request_errors(measured), *empty_successes(measured)]
    good = [item for item in measured if item.sample.error is None and item.sample.n_out > 0]
    return [*checks, *lengths(good, n_prompt, n_out), *finish_reasons(good), *cached_tokens(good, arms)]


def request_errors(measured: Sequence[Measured]) -> list[Check]:
    """V01: a failed request costs its block, for every arm."""
    failed = [item for item in measured if item.sample.error is not None]
    if not failed:
        return []
    return [
        Check("V01", Severity.BLOCK, float(len(failed)), f"{len(failed)} requests failed, first: {told(failed[0])}")
    ]


def empty_successes(measured: Sequence[Measured]) -> list[Check]:
    """V03: a success without a token is a broken server."""
    empty = [item for item in measured if item.sample.error is None and item.sample.n_out == 0]
    if not empty:
        return []
    text = f"{len(empty)} requests succeeded without a token, first: arm {empty[0].arm}, block {empty[0].block}"
    return [Check("V03", Severity.RUN, float(len(empty)), text)]


def lengths(good: Sequence[Measured], n_prompt: int, n_out: int) -> list[Check]:
    """V02: other numbers of tokens than asked for."""
    checks = []
    for what, asked, achieved in (
        ("output", n_out, [item.sample.n_out for item in good]),
        ("prompt", n_prompt, [item.sample.n_prompt for item in good]),
    ):
        wrong = [(item.arm, count) for item, count in zip(good, achieved, strict=True) if count != asked]
        if wrong:
            arm, count = wrong[0]
            text = f"{len(wrong)} requests have other {what} tokens than {asked}, first: arm {arm} has {count}"
            checks.append(Check("V02", Severity.RUN, float(len(wrong)), text))
    return checks


def finish_reasons(good: Sequence[Measured]) -> list[Check]:
    """V02: arms that end for different reasons did different work."""
    reasons = sorted({item.sample.finish or "none" for item in good})
    if len(reasons) < 2:
        return []
    return [Check("V02", Severity.RUN, float(len(reasons)), f"finish reasons differ: {', '.join(reasons)}")]


def cached_tokens(good: Sequence[Measured], arms: Sequence[str]) -> list[Check]:
    """V04: prompt tokens that an arm did not compute; equal and nonzero is said too, unknown as well."""
    by_arm = {arm: [item.sample.n_cached for item in good if item.arm == arm] for arm in arms}
    unknown = [arm for arm, counts in by_arm.items() if any(count is None for count in counts)]
    means = {arm: mean_of([count for count in counts if count is not None]) for arm, counts in by_arm.items() if counts}
    checks = []
    if means and max(means.values()) != min(means.values()):
        text = "cached prompt tokens differ: " + ", ".join(f"{arm} {value:.3g}" for arm, value in means.items())
        checks.append(Check("V04", Severity.RUN, max(means.values()) - min(means.values()), text))
    elif means and max(means.values()) > 0:
        text = f"every arm found {max(means.values()):.3g} cached prompt tokens a request: this prefill is not cold"
        checks.append(Check("V04", Severity.NOTE, max(means.values()), text))
    if unknown:
        text = f"{', '.join(unknown)} does not say how many prompt tokens were cached; prompts are salted"
        checks.append(Check("V04", Severity.NOTE, None, text))
    return checks


def mean_of(counts: Sequence[int]) -> float:
    """Mean, 0 of nothing."""
    return sum(counts) / len(counts) if counts else 0.0


def bad_blocks(measured: Sequence[Measured]) -> set[int]:
    """Blocks that a failed request took with it."""
    return {item.block for item in measured if item.sample.error is not None}


def too_few(valid: int, planned: int) -> list[Check]:
    """V01: not enough blocks are left to judge by."""
    if valid >= MIN_BLOCKS:
        return []
    return [Check("V01", Severity.RUN, float(valid), f"{valid} of {planned} blocks are valid; {MIN_BLOCKS} are needed")]


def null_check(metric: str, fit: Fit) -> list[Check]:
    """V05: the instrument sees a difference between A and A (the null arm's 99 % interval excludes 1)."""
    low, high = (float(end) for end in fit.interval(NULL_LEVEL))
    if low <= 0 <= high:
        return []
    text = (
        f"{metric}: the null arm differs from the baseline it copies, time ratio {math.exp(float(fit.estimate)):.3f} "
        f"(99 % interval {math.exp(low):.3f}–{math.exp(high):.3f})"
    )
    return [Check("V05", Severity.RUN, math.expm1(float(fit.estimate)), text)]


def order_checks(metric: str, arm: str, fit: Fit, k: int, margin: float) -> list[Check]:
    """V06 position and V07 predecessor effects beyond the margin (and beyond chance at 1 %).

    The regression takes both out of the ratio, so with enough blocks they are notes; with fewer than 12 the run falls.
    """
    severity = Severity.RUN if fit.n < DEFAULT_BLOCKS else Severity.NOTE
    found = [("V06", "first to last position", float(fit.position) * (k - 1), fit.position, fit.position_se)]
    if fit.predecessor is not None and fit.predecessor_se is not None:
        what = f"following {arm} rather than another arm"
        found.append(("V07", what, float(fit.predecessor), fit.predecessor, fit.predecessor_se))
    return [
        Check(code, severity, math.expm1(size), f"{metric}, {arm}: {what} changes the time by {math.expm1(size):+.1%}")
        for code, what, size, estimate, se in found
        if abs(size) > math.log1p(margin) and float(two_sided_p(estimate, se, fit.df)) < 1 - NULL_LEVEL
    ]


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[Check]:
    """V12: a target is not what it was when the run began, or no longer there (it has no digest then)."""
    gone = [arm for arm in before if arm not in after]
    other = [arm for arm, digest in before.items() if arm in after and after[arm] != digest]
    if not gone and not other:
        return []
    parts = [f"weights, plan or served model of {', '.join(other)} changed mid-run"] if other else []
    parts += [f"{', '.join(gone)} no longer answered at the end"] if gone else []
    return [Check("V12", Severity.RUN, float(len(gone) + len(other)), "; ".join(parts))]


def unsteady(values: Sequence[float]) -> Check:
    """V15, a note: no heat soak was made; the value is the baseline's drift from first to last block."""
    n = len(values)
    drift = 0.0
    if n > 1:
        middle = (n - 1) / 2
        mean = sum(values) / n
        slope = sum((i - middle) * (value - mean) for i, value in enumerate(values))
        drift = slope / sum((i - middle) ** 2 for i in range(n)) * (n - 1)
    return Check(
        "V15", Severity.NOTE, math.expm1(drift), f"no heat soak; the baseline drifted by {math.expm1(drift):+.1%}"
    )


def told(item: Measured) -> str:
    """Where a request failed and why."""
    return f"arm {item.arm}, block {item.block}: {item.sample.error}"
