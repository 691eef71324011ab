"""What differs between two records: how they were made, and what came out."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pocketllm.evidence.store import Record

IGNORED = {
    *(
        "run_id",
        "started_utc",
        "finished_utc",
        "rows_sha256",
        "wall_s",
        "argv",
        "results",
        "medians",
        "checks",
        "notes",
    ),
    *("summary", "report", "valid", "null_valid", "valid_blocks", "complete", "reason"),
}
"""Keys that are outcomes, or differ between any two runs."""


@dataclass(frozen=True)
class Change:
    """One fact under which two documents differ; None: not told."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Pair:
    """One result of either run; ratios of a bench run are to its own baseline, so they stand beside each other."""

    name: str
    first: str | None
    second: str | None
    same: bool


@dataclass(frozen=True)
class Difference:
    """Two records compared: facts of how they were made, then what came out."""

    made: tuple[Change, ...]
    outcome: tuple[Pair, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def difference(first: Record, second: Record) -> Difference:
    """Compare two records; of different kinds only how they were made is compared."""
    facts = [dict(flat(record.document)) for record in (first, second)]
    names = [name for name in dict.fromkeys([*facts[0], *facts[1]]) if name.partition(".")[0] not in IGNORED]
    made = [Change(name, facts[0].get(name), facts[1].get(name)) for name in names]
    outcomes = [OUTCOMES[record.kind](record) if record.kind in OUTCOMES else {} for record in (first, second)]
    pairs = [
        Pair(name, outcomes[0].get(name), outcomes[1].get(name), outcomes[0].get(name) == outcomes[1].get(name))
        for name in dict.fromkeys([*outcomes[0], *outcomes[1]])
    ]
    return Difference(
        made=tuple(change for change in made if change.first != change.second),
        outcome=tuple(pairs) if first.kind == second.kind else (),
        warnings=tuple(warnings(first, second)),
    )


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in a document; a list whose items have names goes by those."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        for item in value:
            yield from flat({key: one for key, one in item.items() if key != "name"}, f"{name}.{item['name']}")
    else:
        yield name, value


def warnings(first: Record, second: Record) -> Iterator[str]:
    """What a reader must not conclude."""
    if first.kind != second.kind:
        yield f"a {first.kind} record and a {second.kind} record: only how they were made is compared"
    for record in (first, second):
        if not record.complete:
            yield f"{record.run_id} is incomplete: nothing in it is a finding"
        elif record.kind == "bench" and not record.document.get("valid"):
            yield f"{record.run_id} is INVALID: nothing in it is a finding"
    if first.kind == second.kind == "bench":
        yield (
            "two runs at two times are not arms of one run: a difference between their ratios has no verdict; "
            "`pocketllm bench --arms` gives one"
        )


def bench_outcome(record: Record) -> dict[str, str]:
    """Ratio, interval and word of every contrast."""
    return {
        f"{result['metric']}, {result['arm']}": (
            f"{result['ratio']:.3f} ({result['low']:.3f}–{result['high']:.3f}) {result.get('verdict') or ''}".rstrip()
        )
        for result in record.document.get("results") or ()
    }


def golden_outcome(record: Record) -> dict[str, str]:
    """Outcome of every check of every case."""
    found = {}
    for row in record.row_dicts:
        way = f"{row['entry_point']}{':stream' * bool(row['stream'])}@{row['concurrency'] or 1}"
        found[f"{row['case']}, {row['check']}, {way}"] = str(row["outcome"])
    return found


def parity_outcome(record: Record) -> dict[str, str]:
    """Whether each comparison stayed inside its tolerance."""
    return {
        f"{row['subject']} against {row['oracle']}": "inside" if row["passed"] else "OUTSIDE"
        for row in record.row_dicts
    }


OUTCOMES = {"bench": bench_outcome, "golden": golden_outcome, "parity": parity_outcome}
