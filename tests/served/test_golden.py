"""Goldens through real entry points: a tiny checkpoint from record to verify, and the committed ones of SmolLM2."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer

import psutil
import pytest
from typer.testing import CliRunner, Result

from pocketllm.cli.main import app
from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import RecordError
from pocketllm.evidence.store import read_record
from pocketllm.golden.compare import Diverged, Drift, Identical, NotJudged, Regression, Unrecorded
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.judging.gate import gate, gate_url
from pocketllm.golden.judging.mutations import Mutation
from pocketllm.golden.judging.words import describe
from pocketllm.golden.recording.accept import accept
from pocketllm.golden.recording.record import choose_requests, record
from pocketllm.golden.served_path import Server, launch, pocketllm_command, serve_command
from pocketllm.golden.subject import Subject, open_subject, subject_of
from pocketllm.golden.verify import Report, VerifyOptions, verify_subject

CASES = """
[hello]
purpose = "a chat, in every way of asking"
messages = [{ role = "user", content = "hello 日本 🙂" }]
sampling = { max_tokens = 24, temperature = 0.0, ignore_eos = true }
paths = ["in_process", "http_chat", "http_chat:stream", "http_chat:stream@2"]

[draw]
purpose = "a draw from a seed"
prompt = "once upon"
sampling = { max_tokens = 12, temperature = 1.0, seed = 3, ignore_eos = true }
paths = ["in_process", "generate", "http_completions", "http_completions:stream", "http_completions@2"]
"""


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> Iterator[Engine]:
    # the slow backend: the native one has answered in full before a client that leaves is missed
    with load_engine(EngineOptions(model=str(tiny_gguf), backend="reference")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def subject(engine: Engine) -> Subject:
    return subject_of(engine)


@pytest.fixture(scope="module")
def root(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixtures of the tiny checkpoint: recorded, then accepted."""
    root = tmp_path_factory.mktemp("fixtures")
    cases = root / "cases.toml"
    cases.write_text(CASES, encoding="utf-8")
    folder = FixtureFolder(root / subject.name)
    requests = choose_requests(folder, cases, [])
    proposals = record(subject, folder, requests, ["pocketllm", "golden", "record"], record_dir=root / "backing")
    assert all(proposal.answer.noise.is_bit_identical for proposal in proposals)
    assert folder.names() == []
    for proposal in proposals:
        # made in a dirty tree while pocketllm is being worked on: what is tested here is the path, not the tree
        folder.write_answer(replace(proposal.answer, provenance={"commit": None, "dirty": False}))
    accept(subject, folder, folder.pending_names(), "a test", is_ci=False)
    assert folder.pending_names() == []
    return root


def verify(subject: Subject, root: Path, **options: object) -> Report:
    return verify_subject(subject, VerifyOptions(subject.options, fixtures=root, **options))  # type: ignore[arg-type]  # by name


def outcomes(report: Report) -> dict[str, str]:
    return {f"{row.case} {row.path} {row.check}": f"{row.outcome.word} {describe(row.outcome)}" for row in report.rows}


def test_what_was_recorded_comes_back_through_every_entry_point(subject: Subject, root: Path, tmp_path: Path) -> None:
    report = verify(subject, root, record_dir=tmp_path, require=True)

    assert set(outcomes(report).values()) == {"IDENTICAL "}, outcomes(report)
    assert report.exit_code == 0
    assert report.record is not None
    rows = read_record(report.record).row_dicts
    assert {row["entry_point"] for row in rows} == {"in_process", "generate", "http_chat", "http_completions"}
    assert {row["check"] for row in rows} == {"tokens", "scored", "cancel", "shutdown"}
    assert {row["entry_point"] for row in rows if row["check"] == "scored"} >= {"in_process", "http_completions"}
    assert all(row["dlogprob_p99"] < 1e-3 for row in rows if row["check"] in ("tokens", "scored"))
    assert {(row["stream"], row["concurrency"]) for row in rows} == {(False, 1), (True, 1), (True, 2), (False, 2)}


@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        ("id", {Regression, Diverged, Drift}),
        ("prompt-id", {Regression, Drift}),
        ("logit", {Drift, Regression}),
        ("template", {Regression, Drift}),
    ],
)
def test_a_mutated_copy_turns_every_row_red(subject: Subject, root: Path, mutate: Mutation, words: set[type]) -> None:
    report = verify(subject, root, entry_points=("in_process", "http_chat"), mutate=mutate)

    assert {type(row.outcome) for row in report.rows} == words, outcomes(report)
    assert report.exit_code == 1
    assert report.record is None


def test_a_changed_logit_that_an_entry_point_cannot_see_is_not_called_seen(
    subject: Subject, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pocketllm.golden.entry_points.in_process.InProcess.score", lambda *_: None)
    monkeypatch.setattr("pocketllm.golden.judging.judge.compare", lambda *_: Identical())

    report = verify(subject, root, entry_points=("in_process",), mutate="logit")

    assert report.exit_code == 3
    assert "not seen: the changed logit left draw in_process tokens" in report.notes[0]


def test_other_weights_of_the_same_name_are_unrecorded(tiny_gguf: Path, root: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    data[-2000] ^= 1
    other = tmp_path / tiny_gguf.name
    other.write_bytes(data)

    report = verify(open_subject(EngineOptions(model=str(other), backend="reference")), root, record_dir=tmp_path)

    assert {type(row.outcome) for row in report.rows} == {Unrecorded}
    assert "weights_sha256" in str(report.rows[0].outcome)
    assert report.exit_code == 0
    assert verify(report.subject, root, record_dir=tmp_path, require=True).exit_code == 4


def test_a_server_that_is_killed_is_not_judged(
    subject: Subject, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch_doomed(command: list[str]) -> Server:
        server = launch(command)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        return server

    monkeypatch.setattr("pocketllm.golden.served_path.launch", launch_doomed)
    monkeypatch.setattr("pocketllm.golden.entry_points.http.served_model", lambda url, key: "llama")

    report = verify(subject, root, entry_points=("http_chat",), record_dir=tmp_path)

    assert {row.check for row in report.rows} == {"tokens", "scored", "cancel", "shutdown"}
    assert {type(row.outcome) for row in report.rows} == {NotJudged}
    assert "ended with code -9" in str(report.rows[0].outcome)
    assert report.exit_code == 3


def test_an_unaccepted_answer_is_no_answer(subject: Subject, tmp_path: Path) -> None:
    folder = FixtureFolder(tmp_path / subject.name)
    asked = choose_requests(folder, None, ["new"], prompt="a", max_tokens=2)
    record(subject, folder, asked, ["pocketllm"], record_dir=tmp_path / "backing")

    assert verify(subject, tmp_path, require=True, record_dir=tmp_path).exit_code == 4


# -- accepting ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def proposed(subject: Subject, tmp_path: Path) -> FixtureFolder:
    """A proposal in a git checkout of its own, made by clean code."""
    for words in (
        ["init", "-q"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    folder = FixtureFolder(tmp_path / "records" / "fixtures" / subject.name)
    asked = choose_requests(folder, None, ["new"], prompt="a", max_tokens=2)
    [proposal] = record(subject, folder, asked, ["pocketllm"], record_dir=tmp_path / "records" / "local")
    folder.write_answer(replace(proposal.answer, provenance={"commit": None, "dirty": False}))
    return folder


def test_accepting_keeps_the_reason(subject: Subject, proposed: FixtureFolder) -> None:
    accept(subject, proposed, ["new"], "read and right", is_ci=False)

    answer, _ = proposed.answer(proposed.case("new"), subject.hard_key)
    assert answer is not None
    assert answer.provenance["reason"] == "read and right"


def test_nobody_accepts_in_ci_or_without_a_reason(subject: Subject, proposed: FixtureFolder) -> None:
    with pytest.raises(RecordError, match="CI is set"):
        accept(subject, proposed, ["new"], "x", is_ci=True)
    with pytest.raises(RecordError, match="--reason"):
        accept(subject, proposed, ["new"], " ", is_ci=False)
    assert proposed.names() == []


def test_a_dirty_tree_accepts_nothing_but_what_changes_no_answer_does_not_count(
    subject: Subject, proposed: FixtureFolder, tmp_path: Path
) -> None:
    for name in ("notes.md", "docs/page.html", "tests/test_more.py", "new/plan.md", "records/x.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("changed")
    (tmp_path / "code.py").write_text("x = 1\n")
    with pytest.raises(RecordError, match=r"is dirty: commit the code .*: code\.py$"):
        accept(subject, proposed, ["new"], "x", is_ci=False)

    (tmp_path / "code.py").unlink()
    assert len(accept(subject, proposed, ["new"], "x", is_ci=False)) == 2


def test_a_tree_that_git_cannot_judge_is_not_clean(subject: Subject, proposed: FixtureFolder, tmp_path: Path) -> None:
    (tmp_path / ".git" / "index").write_text("damaged")

    with pytest.raises(RecordError, match="git does not tell"):
        accept(subject, proposed, ["new"], "x", is_ci=False)


@pytest.mark.parametrize(
    ("provenance", "message"),
    [({"dirty": True}, "recorded from a dirty tree"), ({"commit": "0" * 40}, "recorded at commit 0000000000")],
)
def test_an_answer_of_other_code_is_not_accepted(
    subject: Subject, proposed: FixtureFolder, provenance: dict[str, object], message: str
) -> None:
    answer = proposed.pending_answer("new", subject.hard_key)
    assert answer is not None
    proposed.write_answer(replace(answer, provenance=provenance))

    with pytest.raises(RecordError, match=message):
        accept(subject, proposed, ["new"], "x", is_ci=False)


def test_an_answer_of_this_code_is_accepted_into_a_repository_that_is_not_this_code_s(
    subject: Subject, proposed: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pocketllm.evidence.provenance.code.code_facts", lambda: {"commit": "1" * 40, "dirty": False})
    answer = proposed.pending_answer("new", subject.hard_key)
    assert answer is not None
    proposed.write_answer(replace(answer, provenance={"commit": "1" * 40, "dirty": False}))

    assert len(accept(subject, proposed, ["new"], "x", is_ci=False)) == 2


def test_an_answer_under_another_hard_key_is_not_accepted(subject: Subject, proposed: FixtureFolder) -> None:
    other = replace(subject, model={**subject.model, "sha256": "e" * 64})

    with pytest.raises(RecordError, match="another hard key"):
        accept(other, proposed, ["new"], "x", is_ci=False)
    with pytest.raises(RecordError, match="nothing is proposed for case 'old'"):
        accept(subject, proposed, ["old"], "x", is_ci=False)


# -- the gate of a benchmark -------------------------------------------------------------------------------------------
def test_the_gate_asks_a_loaded_engine_and_a_server(engine: Engine, subject: Subject, root: Path) -> None:
    assert gate(engine, root).outcome == Identical()
    with launch(serve_command(subject.engine_flags())) as server:
        assert gate_url(server.url, "llama", subject.options, root).outcome == Identical()
        stop = Timer(60, server.terminate)
        stop.start()
        try:
            report = verify(subject, root, url=server.url, entry_points=("http_chat",))
        finally:
            stop.cancel()
    assert report.exit_code == 0, outcomes(report)
    assert {row.check for row in report.rows} == {"tokens", "scored"}


# -- the command -------------------------------------------------------------------------------------------------------
def command(*words: str, **environment: str | None) -> Result:
    return CliRunner().invoke(app, ["golden", *words], env={"CI": None, **environment})


def test_a_fixture_folder_that_is_not_there_is_refused_and_not_passed(tmp_path: Path) -> None:
    result = command("verify", "--fixtures", str(tmp_path / "typo"))

    assert result.exit_code == 2
    assert "typo is no folder" in result.stderr


def test_the_command_ends_with_the_codes_it_promises(tiny_gguf: Path, root: Path, tmp_path: Path) -> None:
    words = ["verify", "--model", str(tiny_gguf), "--fixtures", str(root), "--backend", "reference"]
    words += ["--entry-point", "in_process"]

    green = command(*words, "--json", "--record-dir", str(tmp_path))
    red = command(*words, "--mutate", "id")
    wrong = command(*words, "--case", "nobody")
    unasked = [*words[:-1], "generate", "--case", "hello", "--require"]
    nothing = command(*unasked, "--record-dir", str(tmp_path))

    assert [done.exit_code for done in (green, red, wrong, nothing)] == [0, 1, 2, 4], red.output
    assert json.loads(green.stdout)["counts"] == {"IDENTICAL": 4}
    assert "expected" in red.stdout
    assert wrong.stderr.startswith("error: no case 'nobody'")
    assert "nothing was compared" in nothing.stdout


def test_record_proposes_and_accept_refuses_in_ci(tiny_gguf: Path, tmp_path: Path) -> None:
    words = ["--case", "new", "--model", str(tiny_gguf), "--fixtures", str(tmp_path)]
    asked = [*words, "--prompt", "a", "--max-tokens", "3", "--record-dir", str(tmp_path / "backing")]

    in_ci = command("record", *asked, CI="true")
    assert not list(tmp_path.iterdir())
    proposed = command("record", *asked, "--json")
    refused = command("accept", *words, "--reason", "x", CI="true")
    neither = command("accept", *words[2:], "--reason", "x")

    assert [done.exit_code for done in (in_ci, proposed, refused, neither)] == [2, 0, 2, 2], proposed.output
    assert json.loads(proposed.stdout)[0]["n_out"] == 3
    assert "CI is set" in refused.stderr
    assert "--case NAME, or --all" in neither.stderr


def test_verify_that_is_terminated_ends_its_server(tiny_gguf: Path, root: Path, tmp_path: Path) -> None:
    words = ("golden", "verify", "-m", str(tiny_gguf), "--backend", "reference", "--fixtures", str(root))
    run = subprocess.Popen(
        pocketllm_command(*words, "--case", "hello", "--entry-point", "http_chat"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    servers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not any(server.net_connections() for server in servers) and time.monotonic() < deadline:
        time.sleep(0.05)
        servers = psutil.Process(run.pid).children()
    run.terminate()
    _, errors = run.communicate(timeout=60)

    assert run.returncode == 130, errors
    assert len(servers) == 1
    assert not any(server.is_running() for server in servers)
