"""What CI systems are told: a test case for each case and device, within GitHub's limits; and the evidence texts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from pocketllm.evidence.ci_text import MAX_ANNOTATIONS, MAX_SUMMARY_BYTES, annotation
from pocketllm.golden.compare import Drift as Moved
from pocketllm.golden.compare import Identical, NotJudged, Outcome, Regression, Shift, Stale, Tie, Unrecorded
from pocketllm.golden.files.folder import StaleFile
from pocketllm.golden.fixture import ServedPath
from pocketllm.golden.judging.judge import Row
from pocketllm.golden.reports import ci

PATH = ServedPath("in_process")
SUBJECT: Any = SimpleNamespace(name="smollm", hard_key=SimpleNamespace(label="cpu"))
RED = Regression("tokens", "bell \x07 | pipe", 3, 1, 2, 0.5, 0.5)
DRIFT = Moved(Shift(1.0, 1.0), Shift(0.1, 0.1))


def report(*outcomes: tuple[str, Outcome], stale: int = 0) -> Any:
    files = tuple(StaleFile(Path(f"old{number}.cpu.json"), Stale("there is no case")) for number in range(stale))
    rows = tuple(Row(case, PATH, "tokens", outcome) for case, outcome in outcomes)
    found = [*(row.outcome for row in rows), *(file.outcome for file in files)]
    return SimpleNamespace(subject=SUBJECT, rows=rows, stale=files, notes=("a note",), mutate=None, outcomes=found)


def test_a_case_has_one_test_case_with_its_worst_path() -> None:
    found = report(
        ("a", Identical()), ("a", RED), ("b", Identical()), ("c", Unrecorded("new")), ("d", NotJudged("died"))
    )

    suite = ElementTree.fromstring(ci.junit(found))

    assert suite.attrib["name"] == "pocketllm golden smollm cpu"
    assert [suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert [case.attrib["name"] for case in suite] == ["a [cpu]", "b [cpu]", "c [cpu]", "d [cpu]"]
    assert suite[0][0].tag == "failure"
    assert suite[0][0].text == "in_process tokens: REGRESSION: tokens at 3: expected 1, served 2; bell  | pipe"


def test_a_missing_answer_and_a_tie_fail_only_where_that_is_asked_for() -> None:
    found = report(("a", Unrecorded("new")), ("b", Tie((1,), 0.0, 0.0, 1.0)))

    assert [one.state for one in ci.verdicts(found)] == ["skipped", "passed"]
    assert [one.state for one in ci.verdicts(found, require=True, strict_ties=True)] == ["failed", "failed"]


def test_github_is_told_the_worst_ten_and_how_many_more_there_are() -> None:
    green, red = [(f"g{n}", Identical()) for n in range(5)], [(f"r{n}", DRIFT) for n in range(14)]

    lines = ci.annotations(report(*green, *red, stale=2))

    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == MAX_ANNOTATIONS
    assert errors[0].startswith("::error title=DRIFT%3A smollm r0::in_process tokens")
    assert errors[-1].endswith("::and 5 more, in the step summary")
    assert len([line for line in lines if line.startswith("::warning")]) == 2


def test_a_workflow_command_is_one_line_and_short() -> None:
    line = annotation("error", "a:b,c\n", "50 % of\nlines" + "x" * 10_000)

    assert line.startswith("::error title=a%3Ab%2Cc%0A::50 %25 of%0Alines")
    assert len(line) < 5000
    assert "\n" not in line


@pytest.mark.parametrize("count", [1, 20_000])
def test_a_summary_is_a_table_within_githubs_limit(count: int) -> None:
    text = ci.summary(report(*[(f"case{number}", RED) for number in range(count)]))

    assert text.startswith("### pocketllm golden: smollm on cpu")
    assert "bell \\| pipe" in text or "bell  \\| pipe" in text or "\\|" in text
    assert len(text.encode()) <= MAX_SUMMARY_BYTES


def test_every_outcome_has_a_state() -> None:
    row = Row("a", PATH, "tokens", RED)

    assert ci.state_of(row.outcome) == "failed"
    assert ci.state_of(replace(row, outcome=Stale("x")).outcome) == "skipped"
