"""The validity rules V01…V15: each with its value, and how far it reaches; pure.

V01 to V04 read the requests, V05 to V07 the contrasts, V08 to V10 and V13 to V15 the conditions they were measured in
(`conditions.py`); of V11 the golden gate is asked by the run itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    blocks: tuple[int, ...] = ()
    """Blocks that are lost for every arm, where the severity is BLOCK."""


@dataclass(frozen=True)
class Measured:
    """One measured request, where it stood, and the conditions it ran in; None: cannot be told here."""

    block: int
    arm: str
    sample: Sample
    start: int = 0
    """Which start of the arms' processes this block belongs to; in `process` isolation the start is the sample."""
    point: str = ""
    """Label of the scenario's point."""
    asked: tuple[int, int] | None = None
    """Prompt and output tokens asked for, where they are not the scenario's; V02 compares."""
    offered: int = 1
    """Requests that this one's slot was to keep in flight (closed loop) or send at once (wave); V10 compares."""
    warm: bool = False
    """Whether cached prompt tokens are what is measured, so that V04 has nothing to say."""
    throttle_mask: int | None = None
    """Throttle reasons since the last reading, NVML's bits and `readings.CPU_THERMAL`; V08 compares the arms."""
    loop_lag_ms: float | None = None
    """How late the client's own loop was while this request ran (99th percentile); V09 bounds it."""
    compiles: int | None = None
    """Compilations and graph captures that happened inside this request's window; V13 wants none."""


def sample_checks(measured: Sequence[Measured], n_prompt: int, n_out: int, arms: Sequence[str]) -> list[Check]:
    """V01 request errors, V02 lengths and finish reasons, V03 empty successes, V04 cached tokens."""
    checks = [*request_errors(measured), *empty_successes(measured)]
    good = [item for item in measured if item.sample.error is None and item.sample.n_out > 0]
    cold = [item for item in good if not item.warm]
    return [*checks, *lengths(good, n_prompt, n_out), *finish_reasons(good), *cached_tokens(cold, arms)]


def request_errors(measured: Sequence[Measured]) -> list[Check]:
    """V01: a failed request costs its block, for every arm."""
    failed = [item for item in measured if item.sample.error is not None]
    if not failed:
        return []
    text = f"{len(failed)} requests failed, first: {told(failed[0])}"
    return [Check("V01", Severity.BLOCK, float(len(failed)), text, blocks_of(failed))]


def blocks_of(items: Iterable[Measured]) -> tuple[int, ...]:
    """The blocks that requests stand in, ascending."""
    return tuple(sorted({item.block for item in items}))


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
    for place, what, default in ((1, "output", n_out), (0, "prompt", n_prompt)):
        achieved = [(item.sample.n_prompt, item.sample.n_out)[place] for item in good]
        asked = [default if item.asked is None else item.asked[place] for item in good]
        triples = zip(good, achieved, asked, strict=True)
        wrong = [(item.arm, count, want) for item, count, want in triples if count != want]
        if wrong:
            arm, count, want = wrong[0]
            text = f"{len(wrong)} requests have other {what} tokens than {want}, first: arm {arm} has {count}"
            checks.append(Check("V02", Severity.RUN, float(len(wrong)), text))
    return checks


def finish_reasons(good: Sequence[Measured]) -> list[Check]:
    """V02: requests of one point that end for different reasons did different work."""
    checks = []
    for point in dict.fromkeys(item.point for item in good):
        reasons = sorted({item.sample.finish or "none" for item in good if item.point == point})
        if len(reasons) > 1:
            text = f"finish reasons differ{f' at {point}' * bool(point)}: {', '.join(reasons)}"
            checks.append(Check("V02", Severity.RUN, float(len(reasons)), text))
    return checks


def cached_tokens(good: Sequence[Measured], arms: Sequence[str]) -> list[Check]:
    """V04: prompt tokens that an arm did not compute; equal and nonzero is said too, unknown as well."""
    by_arm = {arm: [item.sample.n_cached for item in good if item.arm == arm] for arm in arms}
    unknown = [arm for arm, counts in by_arm.items() if any(count is None for count in counts)]
    known = {arm: [count for count in counts if count is not None] for arm, counts in by_arm.items()}
    # an arm that tells nothing is unknown, not zero
    means = {arm: sum(counts) / len(counts) for arm, counts in known.items() if counts}
    checks = []
    shown = ", ".join(f"{arm} {value:.3g}" for arm, value in means.items())
    most, least = (max(means.values()), min(means.values())) if means else (0.0, 0.0)
    if most != least or (most > 0 and unknown):
        silent = f"; {', '.join(unknown)} does not say" * bool(unknown)
        checks.append(Check("V04", Severity.RUN, most - least, f"cached prompt tokens differ: {shown}{silent}"))
    elif most > 0:
        text = f"every arm found {most:.3g} cached prompt tokens a request: this prefill is not cold"
        checks.append(Check("V04", Severity.NOTE, most, text))
    elif unknown:
        text = f"{', '.join(unknown)} does not say how many prompt tokens were cached; prompts are salted"
        checks.append(Check("V04", Severity.NOTE, None, text))
    return checks


def lost_blocks(checks: Iterable[Check]) -> set[int]:
    """Blocks that rules took with them."""
    return {block for check in checks if check.severity is Severity.BLOCK for block in check.blocks}


def too_few(valid: int, planned: int) -> list[Check]:
    """V01: not enough blocks are left to judge by."""
    if valid >= MIN_BLOCKS:
        return []
    return [Check("V01", Severity.RUN, float(valid), f"{valid} of {planned} blocks are valid; {MIN_BLOCKS} are needed")]


def null_check(metric: str, fit: Fit, margin: float, tests: int = 1) -> list[Check]:
    """V05: the instrument sees a difference between A and A (the null arm's 99 % interval excludes 1).

    With several judged metrics they share the 1 %: a sound run falls once in a hundred times, however many there are.
    Up to half the margin it is a note, and `seen_bias` of every verdict; beyond, the run falls.
    """
    if not is_seen(fit, tests):
        return []
    estimate, level = float(fit.estimate), null_level(tests)
    low, high = (float(end) for end in fit.interval(level))
    is_small = abs(estimate) <= math.log1p(margin) / 2
    text = (
        f"{metric}: the null arm differs from the baseline it copies, time ratio {math.exp(estimate):.3f} "
        f"({100 * level:.4g} % interval {math.exp(low):.3f}–{math.exp(high):.3f})"
    )
    if is_small:
        text += f", no more than half the margin of {margin:.3g}: verdicts need so much more"
    return [Check("V05", Severity.NOTE if is_small else Severity.RUN, math.expm1(estimate), text)]


def is_seen(fit: Fit, tests: int) -> bool:
    """Whether the null arm's difference is more than chance."""
    low, high = fit.interval(null_level(tests))
    return not float(low) <= 0 <= float(high)


def null_level(tests: int) -> float:
    """The level of the null arm's interval, were there so many judged metrics."""
    return 1 - (1 - NULL_LEVEL) / max(tests, 1)


def order_checks(metric: str, arm: str, fit: Fit, k: int, margin: float) -> list[Check]:
    """V06 position and V07 predecessor effects beyond the margin (and beyond chance at 1 %).

    The regression takes both out of the ratio, so with enough blocks they are notes; with fewer than 12 the run falls.
    """
    severity = Severity.RUN if fit.blocks < DEFAULT_BLOCKS else Severity.NOTE
    rules = (
        ("V06", "first to last position", fit.position, k - 1),
        ("V07", f"following {arm} rather than another arm", fit.predecessor, 1),
    )
    checks = []
    for code, what, effect, steps in rules:
        if effect is None or float(two_sided_p(effect.size, effect.se, fit.order_df)) >= 1 - NULL_LEVEL:
            continue
        size = float(effect.size) * steps
        if abs(size) > math.log1p(margin):
            text = f"{metric}, {arm}: {what} changes the time by {math.expm1(size):+.1%}"
            checks.append(Check(code, severity, math.expm1(size), text))
    return checks


def agreement(answers: Mapping[str, Sample]) -> list[Check]:
    """A V11 note when arms answer one and the same prompt differently; texts are compared where ids are not known."""
    if not answers:
        return []
    by_ids = all(sample.out_ids is not None for sample in answers.values())
    given = {name: sample.out_ids if by_ids else sample.out_text for name, sample in answers.items()}
    first = next(iter(given))
    differ = [name for name, answer in given.items() if answer != given[first]]
    if not differ:
        return []
    text = f"{', '.join(differ)} gives other {'token ids' if by_ids else 'text'} than {first} (greedy)"
    return [Check("V11", Severity.NOTE, float(len(differ)), text)]


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[Check]:
    """V12: a target is not what it was when the run began, or no longer there (it has no digest then)."""
    gone = [arm for arm in before if arm not in after]
    other = [arm for arm, digest in before.items() if arm in after and after[arm] != digest]
    if not gone and not other:
        return []
    parts = [f"weights, plan or served model of {', '.join(other)} changed mid-run"] if other else []
    parts += [f"{', '.join(gone)} no longer answered at the end"] if gone else []
    return [Check("V12", Severity.RUN, float(len(gone) + len(other)), "; ".join(parts))]


def told(item: Measured) -> str:
    """Where a request failed and why."""
    return f"arm {item.arm}, block {item.block}: {item.sample.error}"
