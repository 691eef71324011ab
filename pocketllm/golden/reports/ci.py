"""A verification as a CI system reads it: JUnit XML, GitHub annotations, a GitHub step summary; judges nothing."""

from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from pocketllm.evidence.ci_text import MAX_SUMMARY_BYTES, annotation, cell, clean, limited, shorten
from pocketllm.golden.compare import (
    Diverged,
    Drift,
    Identical,
    NotJudged,
    Outcome,
    Regression,
    Stale,
    Tie,
    Unrecorded,
)
from pocketllm.golden.judging.judge import Row
from pocketllm.golden.judging.words import describe
from pocketllm.golden.reports.text import headline
from pocketllm.golden.verify import Report

State = Literal["passed", "failed", "error", "skipped"]
WORST_FIRST: tuple[State, ...] = ("failed", "error", "skipped", "passed")
MARKS = {"passed": "✅", "failed": "❌", "error": "⚠️", "skipped": "➖"}


@dataclass(frozen=True)
class Verdict:
    """One case on one device, over all its paths: the worst of them."""

    case: str
    state: State
    word: str
    detail: str
    """A line for each path that is not identical."""
    seconds: float


def state_of(outcome: Outcome, require: bool = False, strict_ties: bool = False) -> State:
    """What a CI system shows for an outcome."""
    match outcome:
        case Identical():
            return "passed"
        case Tie():
            return "failed" if strict_ties else "passed"
        case Regression() | Drift() | Diverged():
            return "failed"
        case NotJudged():
            return "error"
        case Unrecorded():
            return "failed" if require else "skipped"
        case Stale():
            return "skipped"


def verdicts(report: Report, require: bool = False, strict_ties: bool = False) -> list[Verdict]:
    """One for each case of a report, in its order."""
    by_case: dict[str, list[Row]] = {}
    for row in report.rows:
        by_case.setdefault(row.case, []).append(row)
    return [_verdict(name, rows, require, strict_ties) for name, rows in by_case.items()]


def _verdict(name: str, rows: list[Row], require: bool, strict_ties: bool) -> Verdict:
    states = [state_of(row.outcome, require, strict_ties) for row in rows]
    worst = rows[min(range(len(rows)), key=lambda index: WORST_FIRST.index(states[index]))]
    told = [row for row in rows if not isinstance(row.outcome, Identical)]
    lines = [f"{row.path} {row.check}: {row.outcome.word}: {describe(row.outcome)}" for row in told]
    seconds = sum(row.observed.e2el_s or 0.0 for row in rows)
    state = min(states, key=WORST_FIRST.index)
    return Verdict(name, state, worst.outcome.word, "\n".join(lines), seconds)


def junit(report: Report, require: bool = False, strict_ties: bool = False) -> str:
    """JUnit XML: a suite a verification, a test case for each case on its device."""
    found = verdicts(report, require, strict_ties)
    label = report.subject.hard_key.label
    suite = ElementTree.Element(
        "testsuite",
        name=clean(f"pocketllm golden {report.subject.name} {label}"),
        tests=str(len(found)),
        failures=str(sum(verdict.state == "failed" for verdict in found)),
        errors=str(sum(verdict.state == "error" for verdict in found)),
        skipped=str(sum(verdict.state == "skipped" for verdict in found)),
        time=f"{sum(verdict.seconds for verdict in found):.3f}",
    )
    for verdict in found:
        element = ElementTree.SubElement(
            suite,
            "testcase",
            classname=clean(f"pocketllm.golden.{report.subject.name}"),
            name=clean(f"{verdict.case} [{label}]"),
            time=f"{verdict.seconds:.3f}",
        )
        _add_state(element, verdict)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_state(element: ElementTree.Element, verdict: Verdict) -> None:
    tag = {"failed": "failure", "error": "error", "skipped": "skipped"}.get(verdict.state)
    if tag is not None:
        ElementTree.SubElement(element, tag, message=clean(verdict.word)).text = clean(verdict.detail)
    elif verdict.detail:
        ElementTree.SubElement(element, "system-out").text = clean(verdict.detail)


def annotations(report: Report, require: bool = False, strict_ties: bool = False) -> list[str]:
    """Workflow commands: an error for each case that fails, a warning for what was not compared; worst first."""
    errors, warnings = [], []
    found = sorted(verdicts(report, require, strict_ties), key=lambda verdict: WORST_FIRST.index(verdict.state))
    for verdict in found:
        title = f"{verdict.word}: {report.subject.name} {verdict.case}"
        if verdict.state in ("failed", "error"):
            errors.append(annotation("error", title, verdict.detail))
        elif verdict.state == "skipped":
            warnings.append(annotation("warning", title, verdict.detail))
    warnings += [annotation("warning", f"STALE: {file.path.name}", file.outcome.reason) for file in report.stale]
    return [line for lines in (errors, warnings) for line in limited(lines, "pocketllm golden")]


def summary(report: Report, require: bool = False, strict_ties: bool = False) -> str:
    """Markdown for GITHUB_STEP_SUMMARY: a line a case, what differs below it."""
    lines = [f"### pocketllm golden: {headline(report)}", "", "| | case | outcome | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {MARKS[verdict.state]} | {cell(verdict.case)} | {cell(verdict.word)} | {cell(verdict.detail)} |"
        for verdict in verdicts(report, require, strict_ties)
    ]
    lines += ["", *(f"- {cell(note)}" for note in report.notes), ""]
    return shorten("\n".join(lines), MAX_SUMMARY_BYTES)
