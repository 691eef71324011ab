"""What past null arms of this machine say about its noise: which records are comparable, and their ln ratios.

A history is keyed by the machine's hard facts, scenario, lengths, isolation, what serves the baseline and where, its
backend and threads, model, blocks and starts; metrics (each at its point) are kept apart in what is returned.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pocketllm.bench.arm import Role

HASHED_HOST = re.compile(r"(?<=://)host-[0-9a-f]{8}")
"""How a record tells a host that is not this machine."""


def null_history(
    directories: Sequence[Path], key: Mapping[str, Any], hard: Mapping[str, Any]
) -> dict[str, list[float]]:
    """ln ratios of past null arms by metric, from complete records with this `history_key` and these hard facts.

    Valid runs and INVALID ones count alike: leaving out null arms that differed would make the machine look quiet. A
    record that cannot be read is passed over.
    """
    from pocketllm.evidence.store import list_records

    found: dict[str, list[float]] = {}
    for record in list_records(directories, on_problem=lambda problem: None):
        if record.kind not in READERS or not record.complete:
            continue
        if (record.document.get("machine") or {}).get("hard") != hard:
            continue
        for metric, estimate in READERS[record.kind](record, key):
            found.setdefault(metric, []).append(estimate)
    return found


def history_key(document: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for a past null arm to say something about this run."""
    workload = document.get("workload") or {}
    arms = document.get("arms") or [{}]
    return {
        "rules_version": document.get("rules_version"),
        "scenario": document.get("scenario"),
        "isolation": document.get("isolation"),
        "blocks": len(document.get("schedule") or ()),
        "starts": document.get("starts") or 1,
        **{name: arms[0].get(name) for name in ("target", "served_by")},
        "host": host_of(arms[0].get("url")),
        **{name: (document.get("plan") or {}).get(name) for name in ("backend", "threads")},
        **{name: workload.get(name) for name in ("n_prompt", "n_out", "requests_per_slot")},
        "model": (document.get("model") or {}).get("sha256"),
    }


def host_of(url: Any) -> str | None:
    """The (hashed) host of a server elsewhere, whose noise is not this machine's; None for one that is here."""
    found = HASHED_HOST.search(str(url))
    return found.group() if found else None


def bench_nulls(record: Any, key: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(metric, ln ratio) of the null arm of a comparable bench run."""
    if history_key(record.document) != key:
        return
    for result in record.document.get("results", []):
        if result.get("role") == Role.NULL.value and isinstance(result.get("estimate"), float):
            yield str(result["metric"]), result["estimate"]


def calibration_nulls(record: Any, key: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(metric, ln ratio) of the null arm of each run of a comparable calibration."""
    if record.document.get("history_key") != key:
        return
    for row in record.row_dicts:
        if row["role"] == Role.NULL.value and row["estimate"] is not None:
            yield row["metric"], row["estimate"]


READERS = {"bench": bench_nulls, "calibration": calibration_nulls}
