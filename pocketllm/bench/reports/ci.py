"""A bench record as a CI system reads it: JUnit XML, GitHub annotations, a GitHub step summary; measures nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from pocketllm.bench.analysis.verdict import Require, Word, exit_code, slowest
from pocketllm.bench.record import judged_words
from pocketllm.bench.reports.words import sentences
from pocketllm.evidence.ci_text import MAX_SUMMARY_BYTES, annotation, cell, clean, limited, shorten

Document = Mapping[str, Any]

SAME_CODE = "nothing to compare: both arms are the same code"
PASSED, FAILED, ERROR, SKIPPED = "passed", "failed", "error", "skipped"


@dataclass(frozen=True)
class Case:
    """One judged contrast under a gate."""

    name: str
    state: str
    word: str
    detail: str


def gate_code(document: Document, require: Require | None) -> int:
    """Exit code of a record under the gate: 0 passed · 1 SLOWER · 3 INVALID or not judged · 4 under-powered."""
    if document.get("same_code"):
        return 0
    words = judged_words(document)
    if document.get("complete") is False or not words:
        return 3
    return exit_code(words, fail_on_slower=True, require=require)


def cases(document: Document, require: Require | None) -> list[Case]:
    """A case for each judged contrast, or one that says why nothing was judged."""
    scenario = str(document.get("scenario"))
    if document.get("same_code"):
        return [Case(scenario, SKIPPED, SAME_CODE, SAME_CODE)]
    told = sentences(document)
    judged = [result for result in document.get("results") or () if result.get("verdict")]
    if document.get("complete") is False or not document.get("valid") or not judged:
        return [Case(scenario, ERROR, "INVALID" if document.get("complete") else "not judged", " ".join(told))]
    return [
        Case(
            f"{scenario}: {result['arm']} against {document['arms'][0]['name']} in {result['metric']}",
            state_of(result, require),
            str(result["verdict"]),
            sentence,
        )
        for result, sentence in zip(judged, told, strict=True)
    ]


def state_of(result: Mapping[str, Any], require: Require | None) -> str:
    """What the gate says of one contrast."""
    code = exit_code([(Word(result["verdict"]), slowest(result), result["margin"])], True, require)
    return {0: PASSED, 1: FAILED, 3: ERROR, 4: FAILED}[code]


# -- JUnit -------------------------------------------------------------------------------------------------------------
def junit(document: Document, require: Require | None) -> str:
    """JUnit XML: a suite a run, a test case a judged contrast; SLOWER is a failure, INVALID an error."""
    found = cases(document, require)
    suite = ElementTree.Element(
        "testsuite",
        name=clean(f"pocketllm bench {document.get('scenario')}"),
        tests=str(len(found)),
        failures=str(sum(case.state == FAILED for case in found)),
        errors=str(sum(case.state == ERROR for case in found)),
        time=f"{document.get('wall_s') or 0:.3f}",
        timestamp=str(document.get("started_utc", "")).rstrip("Z"),
    )
    properties = ElementTree.SubElement(suite, "properties")
    commit = (document.get("code") or {}).get("commit")
    for name, value in (("run_id", document.get("run_id")), ("commit", commit)):
        if value:
            ElementTree.SubElement(properties, "property", name=name, value=clean(str(value)))
    for case in found:
        element = ElementTree.SubElement(suite, "testcase", classname="pocketllm.bench", name=clean(case.name))
        if case.state in (FAILED, ERROR):
            tag = "failure" if case.state == FAILED else "error"
            ElementTree.SubElement(element, tag, message=clean(case.word), type=clean(case.word)).text = clean(
                case.detail
            )
        elif case.state == SKIPPED:
            ElementTree.SubElement(element, "skipped", message=clean(case.word))
        else:
            ElementTree.SubElement(element, "system-out").text = clean(case.detail)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


# -- GitHub ------------------------------------------------------------------------------------------------------------
def annotations(document: Document, require: Require | None) -> list[str]:
    """Workflow commands, one a case: errors for what fails the gate, notices for the rest; at most 10 of each kind."""
    by_level: dict[str, list[str]] = {"error": [], "notice": []}
    for case in cases(document, require):
        level = "error" if case.state in (FAILED, ERROR) else "notice"
        by_level[level].append(annotation(level, f"{case.word}: {case.name}", case.detail))
    return [line for lines in by_level.values() for line in limited(lines, "pocketllm bench")]


def summary(document: Document, require: Require | None, report: str) -> str:
    """Markdown for GITHUB_STEP_SUMMARY: a line a case, then the whole report as text."""
    marks = {PASSED: "✅", FAILED: "❌", ERROR: "⚠️", SKIPPED: "➖"}
    lines = [f"### pocketllm bench {document.get('scenario')}", "", "| | verdict | |", "| --- | --- | --- |"]
    lines += [f"| {marks[case.state]} | {cell(case.word)} | {cell(case.detail)} |" for case in cases(document, require)]
    if document.get("same_code"):
        return "\n".join([*lines, ""])
    lines += ["", f"Record `{document.get('run_id')}`", "", "```text", report.replace("```", "'''"), "```", ""]
    return shorten("\n".join(lines), MAX_SUMMARY_BYTES)
