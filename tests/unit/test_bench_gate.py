"""`pocketllm bench gate`: the exit code, the JUnit file, and what GitHub is told."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pocketllm.bench.analysis.verdict import Require
from pocketllm.bench.reports import ci
from pocketllm.cli.main import app
from pocketllm.evidence.store import list_records
from tests.fake_target import fake_rig
from tests.unit.test_bench_calibrate import noisy
from tests.unit.test_records_query import bench, golden

RUNNER = CliRunner()
Arms = Callable[[Mapping[str, float]], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without records, on no CI system."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def call(*words: str, expected: int = 0) -> Any:
    result = RUNNER.invoke(app, ["bench", "gate", *words], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


def results(*words: str, high: float = 1.05) -> list[dict[str, Any]]:
    """A judged contrast for each word, and the null arm."""
    base = {"metric": "decode", "primary": True, "n": 12, "ratio": 1.0, "low": 0.99, "high": high, "floor": 0.005}
    base |= {
        "margin": 0.01,
        "mde": 0.02,
        "blocks_to_resolve": 48,
        "outlying_blocks": 0,
        "flips_without_outliers": False,
        "reason": "so it is",
    }
    null = {**base, "arm": "null", "role": "null", "verdict": None}
    return [{**base, "arm": f"b{i}", "role": "candidate", "verdict": word} for i, word in enumerate(words)] + [null]


def document(*words: str, high: float = 1.05, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "bench",
        "run_id": "01K9",
        "complete": True,
        "valid": True,
        "scenario": "decode",
        "wall_s": 60.0,
        "started_utc": "2026-11-29T23:00:00.000Z",
        "isolation": "process",
        "checks": [],
        "code": {"commit": "abc"},
        "arms": [{"name": "base", "role": "baseline"}],
        "results": results(*words, high=high),
        **changes,
    }


INVALID = {"valid": False, "checks": [{"code": "V05", "severity": "run", "detail": "A and A differ"}]}


@pytest.mark.parametrize(
    ("told", "plain", "required"),
    [
        (document("SLOWER"), 1, 1),
        (document("FASTER", high=0.95), 0, 0),
        (document("SAME", high=1.004), 0, 0),
        (document("SMALL", high=1.009), 0, 0),
        (document("NOT DISTINGUISHABLE", high=1.03), 0, 4),
        (document("FASTER", "SLOWER"), 1, 1),
        (document("SAME", **INVALID), 3, 3),
        (document("SAME", complete=False), 3, 3),
        (document(), 3, 3),
    ],
    ids=["slower", "faster", "same", "small", "unclear", "one of two", "invalid", "incomplete", "nothing judged"],
)
def test_the_exit_code_of_a_gate(told: dict[str, Any], plain: int, required: int) -> None:
    assert ci.gate_code(told, None) == plain
    assert ci.gate_code(told, Require.SAME_OR_FASTER) == required


def test_a_junit_file_has_a_case_a_contrast_and_counts_that_add_up() -> None:
    suite = ElementTree.fromstring(ci.junit(document("FASTER", "SLOWER", "SAME"), None).encode())
    cases = suite.findall("testcase")

    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["3", "1", "0"]
    assert [case.get("name") for case in cases] == [f"decode: b{i} against base in decode" for i in range(3)]
    assert [case.find("failure") is not None for case in cases] == [False, True, False]
    properties = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert properties == {"run_id": "01K9", "commit": "abc"}


def test_an_invalid_run_is_an_error_and_no_failure() -> None:
    suite = ElementTree.fromstring(ci.junit(document("SLOWER", **INVALID), None).encode())

    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["1", "0", "1"]
    assert "V05 A and A differ" in (next(suite.iter("error")).text or "")


def test_an_underpowered_run_fails_only_where_same_or_faster_is_required() -> None:
    told = document("NOT DISTINGUISHABLE", high=1.03)

    assert "<failure" not in ci.junit(told, None)
    assert "<failure" in ci.junit(told, Require.SAME_OR_FASTER)


def test_names_that_xml_cannot_hold_are_cleaned() -> None:
    told = document("SLOWER", scenario="a<b&\x07\x00")

    assert "a<b&" in str(next(ElementTree.fromstring(ci.junit(told, None).encode()).iter("testcase")).get("name"))


def test_annotations_stay_within_what_github_shows() -> None:
    lines = ci.annotations(document(*["SLOWER"] * 25, *["SAME"] * 3), None)

    assert len([line for line in lines if line.startswith("::error ")]) == 10
    assert len([line for line in lines if line.startswith("::notice ")]) == 3
    assert "and 16 more, in the step summary" in lines[9]
    assert all(len(line.encode()) < 5000 and "\n" not in line for line in lines)


def test_an_annotation_is_escaped_and_cut() -> None:
    [line] = ci.annotations(document("SLOWER", **{**INVALID, "scenario": "a,b:c%"}), None)
    assert line.startswith("::error title=INVALID%3A a%2Cb%3Ac%25::")

    long = {"code": "V05", "severity": "run", "detail": "100 %\n" + "ü" * 5000}
    [line] = ci.annotations(document("SLOWER", valid=False, checks=[long]), None)
    assert "%25%0A" in line
    assert len(line.encode()) < 4300
    assert line.endswith("…")


def test_a_step_summary_is_a_table_and_stays_within_a_mebibyte() -> None:
    text = ci.summary(document("SLOWER", "SAME"), None, "the report | as text\n```\n")

    assert text.startswith("### pocketllm bench decode")
    assert "| ❌ | SLOWER |" in text
    assert "| ✅ | SAME |" in text
    assert text.count("```") == 2
    assert len(ci.summary(document("SAME"), None, "x" * 2**21).encode()) <= 2**20


# -- through the app ---------------------------------------------------------------------------------------------------
def test_a_record_is_gated_told_and_written_as_junit(folder: Path) -> None:
    run_id = bench(folder / "records", nulls=True).stem
    result = call(run_id[:14], "--junit", "out.xml", expected=1)

    assert "b decodes slower than base" in result.stdout
    assert "::error" not in result.stdout
    assert "gate: failed: decode: b against base in decode: SLOWER" in result.stderr
    assert ElementTree.parse(folder / "out.xml").getroot().get("failures") == "1"


def test_on_github_annotations_are_printed_and_the_summary_is_added_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bench(folder / "records", nulls=True).stem
    (folder / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))

    assert "::error title=SLOWER%3A decode%3A b against base in decode::" in call(run_id, expected=1).stdout
    assert "::error" not in call(run_id, "--no-github", expected=1).stdout
    text = (folder / "summary.md").read_text()
    assert text.startswith("before\n### pocketllm bench decode")
    assert text.count("### ") == 1


def test_what_cannot_be_gated_is_refused_in_a_sentence(folder: Path) -> None:
    other = golden(folder / "records").stem

    assert "a gate reads" in call(other, expected=2).stderr
    assert "no record's id begins with 'QQ'" in call("QQ", expected=2).stderr
    assert "known is same-or-faster" in call("QQ", "--require", "faster", expected=2).stderr
    run_id = bench(folder / "records", nulls=True).stem
    assert "cannot write --junit nowhere/x.xml" in call(run_id, "--junit", "nowhere/x.xml", expected=2).stderr
    late = call(run_id, "--fail-on", "slower", "--blocks", "12", expected=2).stderr
    assert late == f"error: {run_id} is a record, whose run is over: leave --fail-on slower --blocks 12 out\n"


@pytest.fixture
def arms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arms:
    """Says what each arm costs in seconds a token."""

    def put(costs: Mapping[str, float]) -> None:
        targets = {name: noisy(seed, mean=cost) for seed, (name, cost) in enumerate(costs.items())}
        monkeypatch.setattr("pocketllm.bench.targets.rig.open_rig", lambda *_: fake_rig(targets))

    return put


FLAGS = ("--arms", "base", "--arms", "b:prefill_chunk=64", "--blocks", "12", "--requests", "1", "--input-len", "16")
FLAGS += ("--output-len", "8", "--scenario", "decode")


@pytest.mark.parametrize(
    ("cost", "flags", "code", "state"),
    [
        (0.012, (), 1, "failed"),
        (0.008, (), 0, "passed"),
        (0.01, ("--require", "same-or-faster"), 0, "passed"),
    ],
)
def test_a_fresh_run_is_gated_by_the_flags_of_bench(
    arms: Callable[[Mapping[str, float]], None],
    folder: Path,
    cost: float,
    flags: tuple[str, ...],
    code: int,
    state: str,
) -> None:
    arms({"base": 0.01, "b": cost, "null": 0.01})
    result = call(*FLAGS, *flags, "--junit", "out.xml", "--record-dir", "runs", expected=code)

    assert f"gate: {state}: decode: b against base in decode" in result.stderr
    assert ElementTree.parse(folder / "out.xml").getroot().get("tests") == "1"
    assert [record.kind for record in list_records([folder / "runs"])] == ["bench"]


def test_a_fresh_run_that_cannot_be_judged_still_leaves_a_junit_file(arms: Arms, folder: Path) -> None:
    arms({"base": 0.01, "b": 0.01, "null": 0.013})
    call(*FLAGS, "--junit", "out.xml", expected=3)

    assert ElementTree.parse(folder / "out.xml").getroot().get("errors") == "1"


def test_flags_that_bench_does_not_know_are_refused_before_anything_runs(folder: Path) -> None:
    assert "No such option" in call("--arms", "base", "--fast", expected=2).output
    assert "╭" not in call("--arms", "base", "--fast", expected=2).output, "a box breaks sentences where nobody watches"
    assert "--no-null gives no verdict" in call(*FLAGS, "--no-null", expected=2).stderr
    assert not (folder / "records").exists() or list_records([folder / "records"]) == []


def test_two_checkouts_of_equal_code_pass_the_gate_and_are_refused_by_bench(folder: Path) -> None:
    for name in ("base", "new"):
        (folder / name / "pocketllm").mkdir(parents=True)
        (folder / name / "pocketllm" / "__init__.py").write_text("")
    flags = ("--scenario", "decode", "--arms", "base:path=base", "--arms", "new:path=new")

    result = call(*flags, "--junit", "out.xml")

    assert result.stderr.splitlines() == [
        "gate: skipped: decode: nothing to compare: both arms are the same code",
    ]
    assert ElementTree.parse(folder / "out.xml").getroot().find("testcase/skipped") is not None
    assert "| ➖ | nothing to compare" in ci.summary({"scenario": "decode", "same_code": True}, None, "")
    assert RUNNER.invoke(app, ["bench", *flags]).exit_code == 2
    assert "are equal" in call(*flags[:4], "--arms", "new:path=./base", expected=2).stderr


def test_junit_is_xml_whatever_an_arm_said() -> None:
    check = {"code": "V01", "severity": "run", "value": 1.0, "detail": "a\ud800b\uffffc\x1bd\re", "blocks": []}
    text = ci.junit(document(valid=False, checks=[check]), None)

    error = ElementTree.fromstring(text.encode()).find("testcase/error")
    assert error is not None
    assert "abcde" in str(error.text)
