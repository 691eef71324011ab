"""How a ratio moved over time: bench records of one series, in order.

A series holds runs that can stand in one line: the same hard machine facts, model, scenario, lengths, isolation, arm,
what the arm and the baseline are, and metric. Absolute times of two days are never set against each other; each point
is a ratio to the baseline of its own run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pocketllm.evidence.store import Record


@dataclass(frozen=True)
class Point:
    """One run of a series: time ratio with its 95 % interval."""

    run_id: str
    started_utc: str
    commit: str | None
    ratio: float
    low: float
    high: float
    verdict: str | None


@dataclass(frozen=True)
class Series:
    """Comparable runs, oldest first."""

    scenario: str
    metric: str
    arm: str
    baseline: str
    isolation: str
    model: str
    machine: str
    key: str
    """Digest of all that must be equal."""
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def trends(
    records: Iterable[Record], scenario: str | None = None, metric: str | None = None, arm: str | None = None
) -> list[Series]:
    """Series of complete and valid bench records, longest first; INVALID runs are no points.

    A metric that is not judged, and a null arm, are shown when they are asked for by name.
    """
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], list[Point]]] = {}
    for record in records:
        document = record.document
        if record.kind != "bench" or not record.complete or not document.get("valid"):
            continue
        for result in document.get("results") or ():
            wanted = ((scenario, document.get("scenario")), (metric, result.get("metric")), (arm, result.get("arm")))
            named = (metric is not None or result.get("primary")) and (arm is not None or result.get("role") != "null")
            if named and all(want is None or want == have for want, have in wanted):
                key = series_key(document, result)
                found.setdefault(key, (document, result, []))[2].append(point(record, result))
    series = [make_series(key, *parts) for key, parts in found.items()]
    return sorted(series, key=lambda one: (-len(one.points), one.scenario, one.metric, one.arm))


def series_key(document: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Digest of what two points of a series have in common; what changes with the code is left out on purpose."""
    arms = {arm.get("name"): arm for arm in document.get("arms") or ()}
    baseline: Mapping[str, Any] = next((arm for arm in arms.values() if arm.get("role") == "baseline"), {})
    workload = document.get("workload") or {}
    same = [
        (document.get("machine") or {}).get("hard"),
        (document.get("model") or {}).get("sha256"),
        (document.get("plan") or {}).get("backend"),
        [document.get(name) for name in ("scenario", "isolation", "rules_version")],
        [workload.get(name) for name in ("n_prompt", "n_out", "concurrency", "points")],
        [arm.get(name) for arm in (baseline, arms.get(result["arm"], {})) for name in ("name", "target", "options")],
        [result.get(name) for name in ("metric", "role")],
    ]
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def point(record: Record, result: Mapping[str, Any]) -> Point:
    """One result as a point."""
    return Point(
        run_id=record.run_id,
        started_utc=str(record.document.get("started_utc")),
        commit=(record.document.get("code") or {}).get("commit"),
        ratio=float(result["ratio"]),
        low=float(result["low"]),
        high=float(result["high"]),
        verdict=result.get("verdict"),
    )


def make_series(key: str, document: Mapping[str, Any], result: Mapping[str, Any], points: Iterable[Point]) -> Series:
    """A series described by its first record."""
    baseline = next((arm.get("name") for arm in document.get("arms") or () if arm.get("role") == "baseline"), "?")
    hard = (document.get("machine") or {}).get("hard") or {}
    return Series(
        scenario=str(document.get("scenario")),
        metric=str(result["metric"]),
        arm=str(result["arm"]),
        baseline=str(baseline),
        isolation=str(document.get("isolation")),
        model=str((document.get("model") or {}).get("name")),
        machine=f"{hard.get('cpu', '?')}, {hard.get('cores_usable', '?')} cores"
        + "".join(f", {name}" for name in hard.get("gpus") or ()),
        key=key,
        points=tuple(sorted(points, key=lambda one: (one.started_utc, one.run_id))),
    )
