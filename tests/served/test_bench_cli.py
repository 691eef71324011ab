"""`pocketllm bench` as a user runs it: on a tiny checkpoint in process, and against a server of our own."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pocketllm.bench.reports.words import sentences
from pocketllm.bench.targets.rig import Rig
from pocketllm.cli import bench as bench_command
from pocketllm.cli.main import app
from pocketllm.evidence.store import read_record, writing
from tests.ctrl_c import ctrl_c_heard, interrupted_while
from tests.served.conftest import Served

SHORT = ("--input-len", "24", "--blocks", "7", "--requests", "1", "--threads", "1", "--soak", "0")
Bench = Callable[..., Result]


@pytest.fixture
def bench(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command with the tiny checkpoint in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    # a busy machine lags in every block; here whole runs are looked at, valid or not
    monkeypatch.setattr("pocketllm.bench.run.hopeless", lambda *question: None)
    return lambda *words: CliRunner().invoke(
        app, ["bench", "--model", str(tiny_gguf), "--backend", "reference", *words]
    )


def test_two_options_of_one_process_are_compared_and_recorded(bench: Bench, tmp_path: Path) -> None:
    answer = bench("--scenario", "prefill", *SHORT, "--arms", "base", "--arms", "chunk-8:prefill_chunk=8")

    (path,) = (tmp_path / "records" / "local").glob("*.parquet")
    record = read_record(path)
    assert answer.exit_code == (0 if record.document["valid"] else 3), answer.output
    assert f"record: records/local/{path.name}" in answer.stderr
    assert "s/token against base" in answer.stdout
    assert "tokens not compared" in answer.stdout
    assert set(sentences(record.document)) <= set(answer.stdout.splitlines())
    assert record.complete
    assert [arm["name"] for arm in record.document["arms"]] == ["base", "chunk-8", "null"]
    plans = {arm["name"]: arm["plan"]["prefill_chunk"] for arm in record.document["arms"]}
    assert plans == {"base": 256, "chunk-8": 8, "null": 256}
    rows = [row for row in record.row_dicts if row["phase"] == "measure"]
    assert {(row["n_prompt"], row["n_out"], row["n_cached"]) for row in rows} == {(24, 1, 0)}
    assert len(rows) == 36
    assert record.document["model"]["architecture"] == "llama"
    assert record.document["served"] is False


@pytest.mark.parametrize("when", ["written", "closed"])
def test_ctrl_c_once_all_is_measured_hides_no_record(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "written":
        monkeypatch.setattr(writing, "write_parquet", interrupted_while(writing.write_parquet))
    else:
        monkeypatch.setattr(Rig, "close", interrupted_while(Rig.close))
    with ctrl_c_heard():
        answer = bench("--scenario", "prefill", *SHORT, "--arms", "base", "--arms", "chunk-8:prefill_chunk=8")

    (path,) = (tmp_path / "records" / "local").glob("*.parquet")
    record = read_record(path)
    assert (answer.exit_code, record.complete) == (130, True), answer.output
    assert set(sentences(record.document)) <= set(answer.stdout.splitlines())
    assert answer.stderr.endswith(f"record: records/local/{path.name}\ninterrupted: the record was whole by then\n")


def test_decode_by_url_is_a_served_record_as_json(bench: Bench, tiny_server: Served, tmp_path: Path) -> None:
    short = (*SHORT, "--output-len", "6")
    answer = bench("--scenario", "decode", *short, "--arms", f"ours:url={tiny_server.url}/v1", "--json")

    document = json.loads(answer.stdout)
    assert answer.exit_code == (0 if document["valid"] else 3), answer.output
    assert (document["isolation"], document["served"], document["complete"]) == ("attach", True, True)
    assert document["arms"][0]["served_by"] == "pocketllm"
    record = read_record(tmp_path / "records" / "local" / document["record"])
    rows = [row for row in record.row_dicts if row["phase"] == "measure"]
    assert {(row["n_prompt"], row["n_out"], row["finish"], row["http_status"]) for row in rows} == {
        (24, 6, "length", 200)
    }
    assert {(sum(row["chunk_ntok"]), bool(row["out_ids_sha256"])) for row in rows} == {(6, True)}
    # client and server share one interpreter here: so short a request may not outlast what they wait for each other
    lost = {check["code"] for check in document["checks"] if check["severity"] == "block"}
    assert {result["metric"] for result in document["results"]} == {
        "decode",
        "prefill",
        "first_decode",
    } or "V09" in lost


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> list[str]:
    """The hub's library over a file that lies in its cache once it is downloaded; what was downloaded."""
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    fetched: list[str] = []

    def download(_: str, file_name: str, **__: object) -> str:
        fetched.append(file_name)
        print("downloading", file=sys.stderr)
        return str(tiny_gguf)

    monkeypatch.setattr(library, "try_to_load_from_cache", lambda *_, **__: str(tiny_gguf) if fetched else None)
    monkeypatch.setattr(library, "get_hf_file_metadata", lambda url, timeout: SimpleNamespace(size=2_500_000))
    monkeypatch.setattr(library, "hf_hub_download", download)
    return fetched


@pytest.mark.parametrize("arm", ["b:prefill_chunk=8", "b:model=hf:o/r/f.gguf"])
def test_a_plan_fetches_nothing_from_the_hub(bench: Bench, hub: list[str], arm: str) -> None:
    common = [] if "hf:" in arm else ["--model", "hf:o/r/f.gguf"]
    answer = bench("--arms", "base", "--arms", arm, "--plan", "--json", *common)

    assert (answer.exit_code, hub) == (0, []), answer.output
    note = "hf:o/r/f.gguf is not here yet: the run fetches it, and its limits are not known before"
    assert json.loads(answer.stdout)["notes"] == [note]

    hub.append("now it is in the cache")
    answer = bench("--arms", "base", "--arms", arm, "--plan", *common, "--input-len", "100000")
    assert (answer.exit_code, "and max_model_len is 512" in answer.stderr, len(hub)) == (2, True, 1)


@pytest.mark.parametrize("arm", ["b:prefill_chunk=8", "b:via=engine,model=hf:o/r/f.gguf"])
def test_a_run_says_what_it_fetches_from_the_hub_before_it_does(bench: Bench, hub: list[str], arm: str) -> None:
    common = [] if "hf:" in arm else ["--model", "hf:o/r/f.gguf"]
    answer = bench("--scenario", "prefill", *SHORT, "--starts", "1", "--arms", "base", "--arms", arm, *common)

    assert hub, answer.output
    assert "fetching f.gguf of o/r from the hub: 2 MB" in answer.stderr.partition("downloading")[0]


def test_a_hub_name_that_cannot_be_is_refused_in_a_sentence(bench: Bench) -> None:
    pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    answer = bench("--arms", "base", "--arms", "b:prefill_chunk=8", "--model", "hf:o/r--r/f.gguf", "--plan")

    assert (answer.exit_code, answer.stderr.count("\n")) == (2, 1), answer.output
    assert answer.stderr.startswith("error: hf:o/r--r/f.gguf: the hub said no: ")


def test_a_plan_runs_nothing(bench: Bench, tmp_path: Path) -> None:
    answer = bench("--arms", "base", "--arms", "b:prefill_chunk=8", "--arms", "c:url=http://127.0.0.1:9", "--plan")
    assert answer.exit_code == 2

    answer = bench("--arms", "base", "--arms", "b:prefill_chunk=8", "--plan", "--model", "no-such-model")
    assert (answer.exit_code, "no-such-model" in answer.stderr) == (2, True)

    answer = bench("--arms", "base", "--arms", "b:prefill_chunk=8", "--plan", "--json")

    plan = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert len(plan["schedule"]) == 12
    assert [row["sd"] for row in plan["mde"]] == [0.005, 0.01, 0.02]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_knows_minutes_from_the_last_record(bench: Bench) -> None:
    arms = ("--scenario", "prefill", *SHORT, "--arms", "base")
    assert "not known" in bench(*arms, "--plan").stdout
    bench(*arms)

    assert "in the last record of this scenario" in bench(*arms, "--plan").stdout


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["--arms", "base", "--scenario", "everything"], 2, "known: concurrency, context, decode"),
        (["--arms", "base", "--budget", "soon"], 2, "is not a time"),
        (["--arms", "base", "--budget", "0s"], 2, "is not a time"),
        (["--arms", "base", "--budget", "0.001s"], 2, "cannot hold 8 blocks of 2 arms"),
        (["--arms", "base", "--blocks", "3"], 2, "--blocks 3 is below 7"),
        (["--arms", "base", "--requests", "0"], 2, "--requests 0 must be at least 1"),
        (["--arms", "base", "--input-len", "0"], 2, "--input-len 0 must be at least 1"),
        (["--arms", "base", "--output-len", "2"], 2, "needs 3 tokens"),
        (["--arms", "base", "--margin", "900%"], 2, "'900%' is out of range: a share is above 0%"),
        (["--arms", "base", "--margin", "much"], 2, "--margin 'much' is not a share"),
        (["--arms", "base", "--margin", "prefill=1%"], 2, "judges decode"),
        (["--arms", "base", "--fail-on", "faster"], 2, "the one gate is `slower`"),
        (["--arms", "base", "--require", "faster"], 2, "same-or-faster"),
        (["--arms", "base", "--arms", "b:reserve=0.5", "--no-null", "--fail-on", "slower"], 2, "nothing to read"),
        (["--arms", "base", "--require", "same-or-faster"], 2, "nothing to read"),
        (["--arms", "b:cmd=no-such-program --port {port}"], 2, "no program 'no-such-program' on the PATH"),
        (["--arms", "b:cmd=no-such-program", "--plan"], 2, "no program 'no-such-program' on the PATH"),
        (["--arms", "b:path=/nowhere", "--plan"], 2, "is no checkout of pocketllm"),
        (["--arms", "b:key_env=NO_SUCH_KEY,url=http://127.0.0.1:9"], 2, "NO_SUCH_KEY is empty or not set"),
        (["--arms", "base", "--starts", "3"], 2, "these arms share one process"),
        (["--arms", "b:via=http", "--starts", "0"], 2, "must be at least 1"),
        (["--arms", "base", "--until", "1%"], 2, "the one rule is half-width"),
        (["--arms", "base", "--until", "half-width=2"], 2, "--until '2' is out of range"),
        (["--arms", "base", "--min-n", "3"], 2, "--min-n 3 must be at least 7"),
        (["--arms", "base", "--points", "8"], 2, "decode has a single point"),
        (["--arms", "base", "--scenario", "concurrency", "--points", "3"], 2, "no point '3'"),
        (["--arms", "b:via=http", "--scenario", "op_latency", "--plan"], 2, "needs an engine in this process"),
        (["--arms", "base", "--prefill-chunk", "0"], 2, "must be at least 1"),
        (["--arms", "base", "--model", "missing.gguf"], 2, "missing.gguf"),
        (["--arms", "base", "--input-len", "100000", "--blocks", "7"], 2, "and max_model_len is 512"),
        (["--arms", "base", "--input-len", "100000", "--plan"], 2, "and max_model_len is 512"),
        (["--arms", "base", "--input-len", "9" * 400], 2, "is above 10000000, more tokens than any model's context"),
        (["--arms", "a:url=http://127.0.0.1:9", "--output-len", "9" * 24], 2, "--output-len 9999"),
        (["--arms", "base", "--requests", "9" * 17, "--plan"], 2, "is above 100000, more than anybody waits for"),
        (["--arms", "base", "--min-n", "9" * 17, "--plan"], 2, "is above 100000"),
        (["--arms", "base", "--budget", "9" * 400, "--plan"], 2, "is more than a year"),
        (["--arms", "base", "--soak", "9999999h", "--plan"], 2, "--soak '9999999h' is more than a year"),
        (["--arms", "b:via=http", "--starts", "9" * 9, "--plan"], 2, "--starts 999999999 make 1999999998 blocks"),
        (["--arms", "base", "--max-model-len", "9" * 400, "--plan"], 2, "must fit 64 bits"),
        (["--arms", "dead:url=http://127.0.0.1:9"], 3, "is the server running?"),
    ],
)
def test_a_mistake_ends_with_one_sentence_and_its_code(bench: Bench, words: list[str], code: int, reason: str) -> None:
    answer = bench(*words)

    assert (answer.exit_code, reason in answer.stderr) == (code, True), answer.output
    assert answer.stdout == ""
    assert "Traceback" not in answer.output


@pytest.mark.parametrize("command", [["--arms", "base"], ["calibrate", "--runs", "2"]], ids=lambda words: words[0])
def test_what_the_context_cannot_hold_is_refused_before_the_weights_are_loaded(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*command, "--model", str(tiny_gguf), "--backend", "reference", "--input-len", "100000"]
    answer = CliRunner().invoke(app, ["bench", *words])

    assert (answer.exit_code, answer.stderr.count("\n")) == (2, 1), answer.output
    assert "and max_model_len is 512: lower --input-len" in answer.stderr


@pytest.mark.parametrize("words", [["--runs", "9" * 17], ["--requests", "9" * 17]], ids=str)
def test_more_runs_than_anybody_waits_for_are_refused(words: list[str]) -> None:
    answer = CliRunner().invoke(app, ["bench", "calibrate", *words])

    assert (answer.exit_code, answer.stderr) == (
        2,
        f"error: {words[0]} {'9' * 17} is above 100000, more than anybody waits for\n",
    )


def test_a_folder_that_cannot_hold_records_is_refused_before_anything_runs(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = bench("--arms", "base", "--record-dir", str(tmp_path / "file"))

    assert (answer.exit_code, "loading" in answer.stderr) == (2, False)


@pytest.mark.parametrize(("argument", "golden", "code"), [("REGRESSION", "RED", 3), ("timeout", "NOT_JUDGED", 3)])
def test_a_red_golden_check_ends_with_3(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argument: str, golden: str, code: int
) -> None:
    from pocketllm.bench.targets import gate

    def red(rig: Any, arm: Any, options: Any) -> gate.GateAnswer:
        return gate.GateAnswer(gate.GateState[golden], argument)

    monkeypatch.setattr(gate, "golden_gate", red)
    answer = bench("--arms", "base")

    assert answer.exit_code == code
    assert "V11 base" in answer.stderr
    assert list((tmp_path / "records" / "local").glob("*")) == []


def test_a_subcommand_runs_alone_and_takes_no_flag_of_bench_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gate:
        @staticmethod
        def register(bench: typer.Typer) -> None:
            bench.command("gate")(lambda: typer.echo("gated"))

    monkeypatch.setattr(bench_command, "SUBCOMMANDS", (Gate,))
    main = typer.Typer()
    bench_command.register(main)
    alone = CliRunner().invoke(main, ["bench", "gate"])
    mixed = CliRunner().invoke(main, ["bench", "--arms", "base", "gate"])

    assert (alone.exit_code, alone.stdout) == (0, "gated\n")
    assert (mixed.exit_code, mixed.stdout) == (2, "")
    assert "--arms stands before gate" in mixed.stderr
