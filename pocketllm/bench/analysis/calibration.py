"""What A/A runs say of the instrument on one machine: how often it calls a difference, its floor, its power; pure.

A run has three arms that are one and the same: the baseline, `again` (judged as a candidate) and the null arm. Every
FASTER or SLOWER of `again` is a false call.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.arm import ArmSet, Role

AGAIN = "again"
CALLED = (Word.FASTER.value, Word.SLOWER.value)
FLOOR_QUANTILE = 0.9
CONFIDENCE = 0.95


def against_itself(arm_set: ArmSet) -> ArmSet:
    """A baseline and its null arm with the baseline once more between them, as a candidate to be judged."""
    baseline, null = arm_set.arms
    return replace(arm_set, arms=(baseline, replace(baseline, name=AGAIN, role=Role.CANDIDATE), null))


def rows_of_run(number: int, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a calibration record from one run's document: a row a metric and arm; one without results, if it fell."""
    codes = [str(check["code"]) for check in document.get("checks") or () if check["severity"] == "run"]
    shared = {
        "run": number,
        "seed": document.get("seed"),
        "started_utc": document.get("started_utc"),
        "wall_s": document.get("wall_s"),
        "valid": document.get("valid"),
        "broken": " ".join(dict.fromkeys(codes)) or None,
    }
    names = ("metric", "arm", "role", "n", "n_unit", "estimate", "se", "df", "low", "high", "sd")
    results = document.get("results") or ()
    for result in results:
        found = {name: result.get(name) for name in (*names, "floor", "mde", "margin", "primary", "verdict", "reason")}
        yield {**shared, **found, "p_value": result.get("p_holm")}
    if not results:
        yield shared


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a metric, judged ones first: false calls and their upper bound, noise floor, smallest change found."""
    metrics = dict.fromkeys(row["metric"] for row in sorted(rows, key=lambda row: not row["primary"]) if row["metric"])
    return [summary_of(metric, [row for row in rows if row["metric"] == metric]) for metric in metrics]


def summary_of(metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of one metric."""
    candidates = [row for row in rows if row["role"] == Role.CANDIDATE.value]
    nulls = [row for row in rows if row["role"] == Role.NULL.value]
    judged = [row for row in candidates if row["verdict"] not in (None, Word.INVALID.value)]
    called = [row for row in judged if row["verdict"] in CALLED]
    words = [row["verdict"] for row in candidates if row["verdict"]]
    return {
        "metric": metric,
        "primary": bool(candidates and candidates[0]["primary"]),
        "runs": len(candidates),
        "judged": len(judged),
        "called": len(called),
        "called_at_most": rate_at_most(len(called), len(judged)),
        "excluding": sum(row["low"] > 1 or row["high"] < 1 for row in candidates),
        "invalid": words.count(Word.INVALID.value),
        "words": {word: words.count(word) for word in dict.fromkeys(words)},
        "n": median_of(candidates, "n"),
        "floor": floor_of(nulls),
        "largest": max((math.expm1(abs(row["estimate"])) for row in (*candidates, *nulls)), default=None),
        "sd": median_of(candidates, "sd"),
        "mde": median_of(candidates, "mde"),
        "margin": candidates[0]["margin"] if candidates else None,
    }


def floor_of(nulls: Sequence[Mapping[str, Any]]) -> float | None:
    """90th percentile of |time ratio − 1| of the null arms, by rank as the verdict takes it."""
    sizes = sorted(abs(row["estimate"]) for row in nulls)
    return math.expm1(sizes[math.ceil(FLOOR_QUANTILE * len(sizes)) - 1]) if sizes else None


def median_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Median of a column over the rows that have it."""
    values = [row[name] for row in rows if row[name] is not None]
    return float(statistics.median(values)) if values else None


def rate_at_most(called: int, runs: int) -> float | None:
    """One-sided 95 % upper bound of a rate, exact (Clopper and Pearson); None of no runs.

    >>> round(rate_at_most(0, 40), 3), round(rate_at_most(1, 40), 3)
    (0.072, 0.113)
    """
    from scipy.special import betaincinv

    if runs == 0:
        return None
    return 1.0 if called == runs else float(betaincinv(called + 1, runs - called, CONFIDENCE))
