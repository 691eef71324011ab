"""`pocketllm records`, through the real app over real files."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.evidence.pages import layout, prefix_length
from pocketllm.evidence.store import RecordWriter, read_record, record_dir

MODEL = {"name": "smollm2-135m", "sha256": "ab" * 32, "architecture": "llama", "quant_types": ["F32", "Q4_1"]}
RUNNER = CliRunner()


def call(*words: str, expected: int = 0) -> Any:
    result = RUNNER.invoke(app, ["records", *words], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def bench(complete: bool = True, **end: Any) -> str:
    document = {
        "device_class": "cpu",
        "model": MODEL,
        "scenario": "prefill",
        "isolation": "toggle",
        "claim": "the option, in this process",
        "margin": {"prefill": 0.01},
        "seed": 7,
        "arms": [
            {"name": "base", "role": "baseline", "target": "engine", "options": {}},
            {"name": "chunk-64", "role": "candidate", "target": "engine", "options": {"prefill_chunk": 64}},
            {"name": "null", "role": "null", "target": "engine", "options": {}},
        ],
        "schedule": [["base", "chunk-64", "null"]] * 12,
    }
    result = {"metric": "prefill", "unit": "s/token", "n": 12, "floor": 0.007, "mde": 0.011}
    whole = {
        "results": [
            {
                **result,
                "arm": "chunk-64",
                "role": "candidate",
                "ratio": 1.042,
                "low": 1.031,
                "high": 1.053,
                "verdict": "SLOWER",
            },
            {**result, "arm": "null", "role": "null", "ratio": 1.001, "low": 0.994, "high": 1.008, "verdict": None},
        ],
        "medians": {"prefill": {"base": 0.002, "chunk-64": 0.002084, "null": 0.002002}},
        "checks": [{"code": "V15", "severity": "note", "value": 0.02, "detail": "the baseline drifts"}],
        "valid": True,
        "null_valid": True,
        "served": False,
        **end,
    }
    with RecordWriter("bench", document, record_dir()) as record:
        record.append({"arm": "base", "phase": "measure", "n_prompt": 256})
        record.finish(whole, complete=complete)
    return record.run_id


def golden(outcome: str = "IDENTICAL", detail: str | None = None, **document: Any) -> str:
    with RecordWriter("golden", {"device_class": "cpu", "model": MODEL, **document}, record_dir()) as record:
        record.append(
            {"case": "capital", "entry_point": "http_chat", "check": "tokens", "stream": True, "concurrency": 2}
            | {"outcome": outcome, "detail": detail, "regret": float("inf")}
        )
    return record.run_id


def parity() -> str:
    with RecordWriter("parity", {"device_class": "cpu", "model": MODEL}, record_dir()) as record:
        row = {
            "subject": "logits",
            "oracle": "transformers",
            "oracle_version": "5.24",
            "n": 512,
            "kl": 3e-7,
            "top1": 1.0,
        }
        record.append([{**row, "tolerance": 1e-5, "passed": True}, {**row, "passed": False, "detail": "worse at 17"}])
    return record.run_id


def inspect() -> str:
    with RecordWriter("inspect", {"device_class": "cpu", "model": MODEL}, record_dir()) as record:
        record.append({"tensor": "output.weight", "quant_type": "Q4_1", "shape": [4, 2], "num_bytes": 8})
        record.finish({"report": {"errors": [], "family": "llama"}})
    return record.run_id


def test_no_records_is_said_on_stderr_and_stdout_stays_empty(folder: Path) -> None:
    result = call("ls")

    assert result.stdout == ""
    assert "no records here" in result.stderr
    assert json.loads(call("ls", "--json").stdout) == []


def test_the_list_tells_what_came_out_of_each_run(folder: Path) -> None:
    ids = [bench(), golden(), parity(), inspect()]

    lines = call("ls").stdout.splitlines()

    assert len(lines) == 5
    for line, run_id, words in zip(
        lines[1:],
        ids,
        ("prefill: chunk-64 SLOWER", "1 IDENTICAL", "1 of 2 inside tolerance", "no errors"),
        strict=True,
    ):
        assert run_id.startswith(line.split()[0])
        assert read_record(line.split()[0]).run_id == run_id
        assert words in line
        assert "local" in line


def test_the_list_can_be_of_one_kind_and_for_programs(folder: Path) -> None:
    bench()
    run_id = golden()

    [entry] = json.loads(call("ls", "--kind", "golden", "--json").stdout)

    assert entry["run_id"] == run_id
    assert entry["summary"] == "1 IDENTICAL (smollm2-135m)"
    assert entry["complete"] is True


def test_an_unknown_kind_and_a_missing_folder_are_refused(folder: Path) -> None:
    assert "no record kind 'bnech'" in call("ls", "--kind", "bnech", expected=2).stderr
    assert "no folder nowhere" in call("ls", "--record-dir", "nowhere", expected=2).stderr


def test_a_broken_file_is_told_and_the_rest_listed(folder: Path) -> None:
    golden()
    (record_dir() / "01BROKEN.parquet").write_text("no parquet")

    result = call("ls")

    assert "warning: 01BROKEN.parquet is not a Parquet file" in result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_a_killed_run_is_listed_as_incomplete(folder: Path) -> None:
    RecordWriter("golden", {"device_class": "cpu", "model": MODEL}, record_dir())

    assert "incomplete: nothing compared" in call("ls").stdout


def test_the_page_of_a_bench_run_shows_arms_intervals_checks_machine_and_code(folder: Path) -> None:
    text = call("show", bench()).stdout

    for words in (
        "prefill",
        "toggle",
        "12 blocks, 36 slots, seed 7",
        "chunk-64",
        "prefill_chunk=64",
        "1.042",
        "1.031-1.053",
        "SLOWER",
        "0.7%",
        "500.0 tokens/s",
        "V15 (note): the baseline drifts",
        "cores usable",
        "packages",
        "1 rows in",
    ):
        assert words in text, words
    packages = next(line for line in text.splitlines() if line.startswith("  packages "))
    assert {"numpy", "torch", "pyarrow"} <= set(packages.split())


def test_the_page_of_a_run_fits_80_columns_where_there_are_as_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bench()
    monkeypatch.setenv("COLUMNS", "80")

    assert max(map(len, call("show", run_id).stdout.splitlines())) <= 80


def test_an_invalid_run_says_so_before_any_ratio(folder: Path) -> None:
    checks = [{"code": "V05", "severity": "run", "value": 0.03, "detail": "A and A differ"}]
    run_id = bench(valid=False, null_valid=False, checks=checks)

    text = call("show", run_id).stdout

    assert "prefill INVALID V05" in call("ls").stdout
    assert text.index("INVALID") < text.index("1.042")


def test_an_interrupted_benchmark_has_no_verdict_rather_than_an_invalid_one(folder: Path) -> None:
    checks = [{"code": "V01", "severity": "run", "value": 5, "detail": "5 of 5 blocks are valid; 7 are needed"}]
    run_id = bench(valid=False, complete=False, checks=checks)

    assert "incomplete: prefill, no verdict" in call("ls").stdout
    assert "INCOMPLETE: nothing below is a finding" in call("show", run_id).stdout


def test_the_pages_of_the_other_kinds_show_their_rows(folder: Path) -> None:
    assert "capital  http_chat    tokens  yes     2      REGRESSION" in (
        text := call("show", golden("REGRESSION", "text differs at character 3")).stdout
    )
    assert "capital (http_chat): text differs at character 3" in text
    assert "transformers 5.24" in (text := call("show", parity()).stdout)
    assert "worse at 17" in text
    assert "family            llama" in call("show", inspect()).stdout


def test_a_record_for_programs_holds_the_document_and_the_rows_when_asked(folder: Path) -> None:
    run_id = golden()

    value = json.loads(call("show", run_id, "--json").stdout)
    assert value["document"]["run_id"] == run_id
    assert value["num_rows"] == 1
    assert "rows" not in value

    [row] = json.loads(call("show", run_id, "--json", "--rows").stdout)["rows"]
    assert row["case"] == "capital"
    assert row["regret"] is None
    assert "--rows needs --json" in call("show", run_id, "--rows", expected=2).stderr


def test_a_record_whose_text_steers_terminals_is_shown_harmless(folder: Path) -> None:
    text = call("show", golden("REGRESSION", "\x1b[2Jgone\x07")).stdout

    assert "\x1b" not in text
    assert "\x07" not in text
    assert "gone" in text


def test_a_list_of_records_whose_names_steer_terminals_is_shown_harmless(folder: Path) -> None:
    with RecordWriter("golden", {"device_class": "cpu", "model": {"name": "\x1b[2Jgone"}}, record_dir()):
        pass

    text = call("ls").stdout

    assert "\x1b" not in text
    assert "gone" in text


def test_an_interrupted_run_says_what_ended_it(folder: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        RecordWriter("golden", {"device_class": "cpu", "model": {}}, record_dir()) as r,
    ):
        raise KeyboardInterrupt

    assert "INCOMPLETE: ended by KeyboardInterrupt" in call("show", r.run_id).stdout


def test_keeping_a_record_prints_where_it_went_and_the_list_knows(folder: Path) -> None:
    run_id = golden()

    path = call("keep", run_id[:14]).stdout.strip()

    assert path.startswith("records/golden/year=")
    assert (folder / path).is_file()
    assert "kept" in call("ls").stdout
    assert len(call("ls").stdout.splitlines()) == 2


def test_a_file_that_is_no_record_is_not_looked_for_as_an_id(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")

    for words in (["show"], ["keep"], ["verify"], ["export", "--to", "junit"]):
        told = call(*words, "./model.gguf", expected=2).stderr
        assert "./model.gguf is no run record: those are .parquet files" in told, words


def test_what_must_not_be_kept_is_refused_with_exit_code_2(folder: Path) -> None:
    invalid = bench(valid=False)
    incomplete = RecordWriter("golden", {"device_class": "cpu", "model": MODEL}, record_dir()).run_id

    assert "--force" in call("keep", invalid, expected=2).stderr
    assert "incomplete" in call("keep", incomplete, "--force", expected=2).stderr
    assert "no record's id begins with 'QQ'" in call("keep", "QQ", expected=2).stderr
    assert call("keep", invalid, "--force").stdout.startswith("records/bench/")


def test_a_path_longer_than_a_line_stays_whole() -> None:
    path = "/home/someone/.cache/" + "a-long-name/" * 6 + "model.gguf"

    assert path in "\n".join(layout.facts(("cached", path), ("size", "3 MB")))


def test_a_table_is_whole_in_a_pipe_and_cuts_its_widest_column_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> list[str]:
        return layout.table(("a", "b", "c"), [("x" * 200, "y" * 10, None)])

    assert lines()[1] == f"  {'x' * 200}  {'y' * 10}"
    assert "c" not in lines()[0]
    monkeypatch.setenv("COLUMNS", "90")
    assert len(lines()[1]) == 90
    assert lines()[1].endswith("…  " + "y" * 10)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(layout.sys.stdout, "isatty", lambda: True, raising=False)
    assert len(lines()[1]) == 80


def test_ids_are_shortened_only_as_far_as_they_differ() -> None:
    assert prefix_length(["A" * 26, "A" * 12 + "B" * 14]) == 13
    assert prefix_length(["A" * 26, "B" * 26]) == 10
    assert prefix_length([]) == 10
