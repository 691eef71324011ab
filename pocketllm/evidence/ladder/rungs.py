"""Climbing: what each rung asks of the records, and what is missing; pure.

What counts is the latest judgement of each check: a failure demotes at once and until the same check passes again;
UNRECORDED, NOT JUDGED and an INVALID bench run neither prove nor demote.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pocketllm.evidence.ladder.rows import UNKNOWN, Evidence, LadderRow, Proof, Subject, proof
from pocketllm.evidence.ladder.suite import HTTP_WAYS, PASSED, Row, Suite, http_lacks, proves_generate, suite_lacks

FAILED = frozenset({"REGRESSION", "DRIFT", "DIVERGED"})
TEACHER_FORCED = 64
"""Positions of the real checkpoint that prove as much as a tiny one of its family."""

Verdict = tuple[list[Proof], list[str]]
"""Proofs of one rung, and what it lacks; it is proved when nothing is missing."""


def climb(subject: Subject, evidence: Sequence[Evidence], suite: Suite) -> LadderRow:
    """One subject's row: up the rungs until one lacks a proof."""
    same_device = [item for item in evidence if item.device_class == subject.device_class]
    own = [item for item in same_device if item.model.get("sha256") == subject.sha256]
    of_checkpoint = [item for item in evidence if item.model.get("sha256") == subject.sha256]
    proofs: list[Proof] = []
    missing: list[str] = []
    rung = 0
    checks: tuple[Callable[[], Verdict], ...] = (
        lambda: inspected(of_checkpoint),
        lambda: within_parity(subject, same_device),
        lambda: through_generate(own, suite),
        lambda: through_http(own, suite),
    )
    for check in checks:
        found, missing = check()
        if missing:
            break
        rung += 1
        proofs += [replace(proof, rung=rung) for proof in found]
    return LadderRow(
        model=subject.model,
        architecture=subject.architecture,
        sha256=subject.sha256,
        device_class=subject.device_class,
        rung=rung,
        freshness=UNKNOWN,
        proofs=tuple(proofs),
        missing="; ".join(missing),
    )


def inspected(own: Sequence[Evidence]) -> Verdict:
    """Rung 1: the latest inspection found no errors."""
    latest = next((item for item in reversed(own) if item.kind == "inspect"), None)
    if latest is None:
        return [], ["an inspect record of this checkpoint"]
    report = latest.document.get("report")
    errors = report.get("errors") if isinstance(report, Mapping) else None
    if not isinstance(errors, Sequence):
        return [], [f"inspect record {latest.run_id} does not say which errors it found"]
    if errors:
        return [], [f"inspect record {latest.run_id} tells of {len(errors)} error{'s' * (len(errors) != 1)}"]
    return [proof(latest, "inspect without errors")], []


# -- rung 2 ------------------------------------------------------------------------------------------------------------
def within_parity(subject: Subject, evidence: Sequence[Evidence]) -> Verdict:
    """Rung 2: an outside oracle agrees on the real checkpoint, or on tiny ones of its family that cover its types."""
    family = [
        item
        for item in evidence
        if item.kind == "parity"
        and (item.model.get("sha256") == subject.sha256 or item.model.get("architecture") == subject.architecture)
    ]
    failed = standing(
        ((item.model.get("sha256"), item.quant_types, row.get("subject"), row.get("oracle")), row.get("passed"), item)
        for item in family
        # a failure with types that this checkpoint does not have says nothing about it
        if item.model.get("sha256") == subject.sha256 or item.quant_types <= subject.quant_types
        for row in item.rows
    )
    if failed:
        return [], [told(failed, "parity", lambda key: f"{key[2]} against {key[3]}")]
    passing = [
        item for item in family if all(row.get("passed") is True for row in item.rows) and measures(item.rows, 1)
    ]
    for item in reversed(passing):
        if item.model.get("sha256") == subject.sha256 and measures(item.rows, TEACHER_FORCED):
            return [proof(item, "parity of the real checkpoint")], []
    return cover(subject, passing)


def measures(rows: Sequence[Row], positions: int) -> bool:
    """Whether a parity record compares numbers (not only tokens or texts) over at least so many positions."""
    figures = ("max_error", "mean_error", "nmse", "top1", "kl")
    return any((row.get("n") or 0) >= positions and any(row.get(name) is not None for name in figures) for row in rows)


def cover(subject: Subject, passing: Sequence[Evidence]) -> Verdict:
    """Tiny-checkpoint records that together have every quant type of the subject: few, then late ones."""
    if not passing or not subject.quant_types:
        return [], [f"a parity record of family {subject.architecture or '(unknown)'} inside tolerance"]
    needed, chosen = set(subject.quant_types), []
    for item in sorted(passing, key=lambda item: (len(needed & item.quant_types), item.run_id), reverse=True):
        if needed & item.quant_types:
            needed -= item.quant_types
            chosen.append(proof(item, f"parity of family {subject.architecture}"))
    if needed:
        return [], [f"a parity record of family {subject.architecture} with {', '.join(sorted(needed))}"]
    return chosen, []


# -- rungs 3 and 4 -----------------------------------------------------------------------------------------------------
def through_generate(own: Sequence[Evidence], suite: Suite) -> Verdict:
    """Rung 3: golden answers through `generate`, and a bench run whose null arm is valid."""
    found: list[Proof] = []
    entry_points = ("generate", "in_process")
    missing = golden_failures(own, entry_points) + gaps(suite)
    latest, lack = most_of(
        [item for item in own if item.kind == "golden" and proves_generate(item.rows)], suite, entry_points
    )
    if latest is None:
        missing.append("a golden record through generate, all IDENTICAL or TIE")
    elif lack:
        missing.append(lacks_cases(latest, lack))
    else:
        found.append(proof(latest, "golden through generate"))
    return benched(own, found, missing, served=False)


def through_http(own: Sequence[Evidence], suite: Suite) -> Verdict:
    """Rung 4: golden answers through real HTTP in every way of asking, and a served bench run."""
    found: list[Proof] = []
    entry_points = ("http_chat", "http_completions")
    missing = golden_failures(own, entry_points)
    lacks = [(item, http_lacks(item.rows)) for item in reversed(own) if item.kind == "golden"]
    latest, cases = most_of([item for item, lack in reversed(lacks) if not lack], suite, entry_points)
    if latest is not None and not cases:
        found.append(proof(latest, "golden through HTTP", served=True))
    elif latest is not None:
        missing.append(lacks_cases(latest, cases))
    elif not lacks or all(len(lack) == len(HTTP_WAYS) for _, lack in lacks):
        missing.append("a golden record through HTTP")
    else:
        item, lack = min(lacks, key=lambda pair: len(pair[1]))
        missing.append(f"golden record {item.run_id} lacks {', '.join(lack)}")
    return benched(own, found, missing, served=True)


def gaps(suite: Suite) -> list[str]:
    """A sentence when the model's fixtures leave out what every suite has."""
    if not suite.pairs:
        return ["accepted fixtures of this model"]
    return [f"fixtures with {', '.join(suite.lacks)}"] if suite.lacks else []


def most_of(golden: Sequence[Evidence], suite: Suite, entry_points: Sequence[str]) -> tuple[Evidence | None, list[str]]:
    """Of golden records, oldest first, the latest that lacks fewest cases of the suite, and which it lacks."""
    best: tuple[Evidence | None, list[str]] = (None, [])
    for item in golden:
        lack = suite_lacks(item.rows, suite, entry_points)
        if best[0] is None or len(lack) <= len(best[1]):
            best = (item, lack)
    return best


def lacks_cases(item: Evidence, cases: Sequence[str]) -> str:
    """A sentence about a golden record of a part of the suite."""
    return f"golden record {item.run_id} lacks case{'s' * (len(cases) > 1)} {', '.join(cases)} of the suite"


def benched(own: Sequence[Evidence], found: list[Proof], missing: list[str], served: bool) -> Verdict:
    """Add the latest valid bench run with a valid null arm (over HTTP when `served`) to a rung's verdict."""
    for item in reversed(own):
        valid = item.document.get("valid") is True and item.document.get("null_valid") is True
        if item.kind == "bench" and valid and (not served or item.document.get("served") is True):
            found.append(proof(item, "served bench, null valid" if served else "bench, null valid", item.is_served))
            return found, missing
    missing.append(f"a {'served ' if served else ''}bench record with a valid null arm")
    return found, missing


# -- failures that stand -----------------------------------------------------------------------------------------------
def golden_failures(own: Sequence[Evidence], entry_points: Sequence[str]) -> list[str]:
    """One sentence when a golden check through these entry points failed and has not passed since."""

    def judgements() -> Iterator[tuple[tuple[Any, ...], bool | None, Evidence]]:
        for item in own:
            for row in item.rows if item.kind == "golden" else ():
                if row.get("entry_point") in entry_points:
                    outcome = row.get("outcome")
                    names = ("case", "entry_point", "check", "stream", "concurrency")
                    passed = True if outcome in PASSED else False if outcome in FAILED else None
                    yield tuple(row.get(name) for name in names), passed, item

    failed = standing(judgements())
    return [told(failed, "golden", lambda key: f"case {key[0]} through {key[1]}")] if failed else []


def standing(judgements: Iterable[tuple[tuple[Any, ...], Any, Evidence]]) -> dict[tuple[Any, ...], Evidence]:
    """Checks whose latest judgement is a failure, with the record that says so; None is no judgement."""
    latest: dict[tuple[Any, ...], tuple[bool, Evidence]] = {}
    for key, passed, item in judgements:
        if passed is False and key in latest and latest[key][1] is item:
            latest[key] = (False, item)  # two rows of one record: the worse one speaks
        elif passed is not None and not (key in latest and latest[key][1] is item):
            latest[key] = (bool(passed), item)
    return {key: item for key, (passed, item) in latest.items() if not passed}


def told(failed: Mapping[tuple[Any, ...], Evidence], kind: str, name: Callable[[tuple[Any, ...]], str]) -> str:
    """A sentence about standing failures: the first, and how many more."""
    key, item = next(iter(failed.items()))
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{kind} record {item.run_id} failed: {name(key)}{more}; it must pass again"
