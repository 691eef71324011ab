"""Arms as processes of their own: started, asked, logged and ended; by command line, by recipe, of this engine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from pocketllm.bench.arm import make_arms
from pocketllm.bench.targets import process
from pocketllm.bench.targets.process import Site, start_arm
from pocketllm.bench.targets.rig import open_rig
from pocketllm.cli.main import app
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import NotJudgedError
from pocketllm.evidence.device_class import device_class
from pocketllm.evidence.store import read_record
from pocketllm.golden.served_path import pocketllm_command

PLAIN = f"{sys.executable} -u {Path(__file__).with_name('plain_server.py')} --port {{port}} --name {{model_name}}"
Bench = Callable[..., Result]


@pytest.fixture
def bench(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command with the tiny checkpoint in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    # a busy machine lags in every block; here whole runs are looked at, valid or not
    monkeypatch.setattr("pocketllm.bench.run.hopeless", lambda *question: None)
    common = ("--model", str(tiny_gguf), "--threads", "1", "--soak", "0")
    lengths = ("--input-len", "24", "--output-len", "6", "--blocks", "7", "--requests", "1")
    return lambda *words: CliRunner().invoke(app, ["bench", *common, *lengths, *words])


@pytest.fixture
def site(tiny_gguf: Path, tmp_path: Path) -> Site:
    return Site(tiny_gguf, "tiny", EngineOptions(model=str(tiny_gguf), threads=1), tmp_path, "run")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_servers_by_command_line_are_compared_over_fresh_starts_and_none_survives(bench: Bench, tmp_path: Path) -> None:
    before = children()
    # 4 ms a token: the client's own lag is small against that
    slow, slower = f"a:cmd={PLAIN} --token-s 0.004", f"b:cmd={PLAIN} --token-s 0.006"
    answer = bench("--arms", slow, "--arms", slower, "--starts", "2")

    (path,) = (tmp_path / "records" / "local").glob("*.parquet")
    record = read_record(path)
    document = record.document
    assert answer.exit_code in (0, 3), answer.output
    assert (document["isolation"], document["starts"], document["served"], document["device_class"]) == (
        *("process", 2),
        *(False, "unknown"),
    )
    assert "these processes only: each arm was started 2 times" in document["claim"]
    assert [arm["name"] for arm in document["arms"]] == ["a", "b", "null"]
    assert document["arms"][1]["argv"][-1] == "0.006"
    assert "{port}" in document["arms"][0]["argv"]
    rows = [row for row in record.row_dicts if row["phase"] == "measure"]
    assert {(row["block"] // 6, row["start"]) for row in rows} == {(0, 0), (1, 1)}
    assert {row["n_out"] for row in rows} == {6}
    assert all(row["rss"] > 1e6 and row["loop_lag_ms"] is not None for row in rows)
    logs = sorted(file.name.split("-", 1)[1] for file in (tmp_path / "records" / "local" / "logs").iterdir())
    assert logs == ["a-0.log", "a-1.log", "b-0.log", "b-1.log", "null-0.log", "null-1.log"]
    assert children() == before


def test_this_engine_is_served_by_itself_and_asked_in_process_beside_that(bench: Bench) -> None:
    answer = bench("--arms", "served:max_num_seqs=2,via=http", "--arms", "inside:via=engine", "--starts", "1", "--json")

    document = json.loads(answer.stdout)
    told = {arm["name"]: arm for arm in document["arms"]}
    assert (document["isolation"], document["served"]) == ("process", True)
    assert document["device_class"] == device_class(told["served"]["plan"])
    assert {name: arm["target"] for name, arm in told.items()} == {
        **dict.fromkeys(("served", "null"), "openai_http"),
        "inside": "engine",
    }
    assert told["served"]["plan"]["max_num_seqs"] == told["null"]["plan"]["max_num_seqs"] == 2
    assert told["inside"]["plan"]["max_num_seqs"] == 8
    assert told["served"]["code"].get("commit") == document["code"].get("commit")
    assert told["served"]["argv"][:2] == ["pocketllm", "serve"]
    assert not any("gives other" in check["detail"] for check in document["checks"])


@pytest.mark.parametrize(
    ("extra", "reason"),
    [("--dies", "arm x: the server ended with code 7 before it was ready"), ("--never-ready", "not ready after 0.5 s")],
)
def test_a_server_that_does_not_come_up_says_why_with_the_end_of_its_log(site: Site, extra: str, reason: str) -> None:
    before = children()
    arm = make_arms([f"x:ready_timeout=0.5,cmd={PLAIN} {extra}"], EngineOptions()).baseline

    with pytest.raises(NotJudgedError, match=reason) as caught:
        start_arm(arm, site, 0)

    assert "weights are where they should be" in str(caught.value)
    assert children() == before


def test_a_server_that_ignores_sigterm_is_killed_and_its_log_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setenv("POCKETLLM_API_KEY", "secret")
    arm = make_arms([f"x:cmd={PLAIN} --ignores-sigterm"], EngineOptions()).baseline
    target = start_arm(arm, site, 0)
    pid = target.pid
    target.close()

    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert "no key" in (site.logs / "run-x-0.log").read_text()


def test_a_server_that_lists_another_model_than_it_was_told_to_is_not_judged(site: Site) -> None:
    arm = make_arms([f"x:cmd={PLAIN.replace('--name', '--name other --echo')}"], EngineOptions()).baseline

    with pytest.raises(NotJudgedError, match="does not list the model 'tiny'; it lists other"):
        start_arm(arm, site, 0)


def test_a_change_of_the_weights_is_seen_from_one_start_to_the_next(tiny_gguf: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, model)
    arms = make_arms([f"x:cmd={PLAIN}"], EngineOptions())
    rig = open_rig(arms, EngineOptions(model=str(model)), lambda line: None, tmp_path)
    try:
        first = rig.fingerprints()
        rig.renew(arms, 1)
        again = rig.fingerprints()
        os.utime(model)
        changed = rig.fingerprints()
    finally:
        rig.close()

    assert first == again != changed
    assert rig.targets == {}


@contextmanager
def heard(number: int) -> Iterator[None]:
    """Processes started meanwhile hear the signal: tests run in a shell's background are born deaf to SIGINT."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_paid_for_and_ends_its_servers(
    tiny_gguf: Path, tmp_path: Path, signal_number: int
) -> None:
    words = ("--model", str(tiny_gguf), "--input-len", "24", "--output-len", "6", "--requests", "1", "--soak", "0")
    command = pocketllm_command("bench", *words, "--arms", f"a:cmd={PLAIN} --token-s 0.01", "--starts", "2")
    with heard(signal_number):
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    local = tmp_path / "records" / "local"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(b"measure" in file.read_bytes() for file in local.glob("*.journal*")):
        time.sleep(0.02)
    servers = psutil.Process(run.pid).children()
    run.send_signal(signal_number)
    output, errors = run.communicate(timeout=60)

    (path,) = local.glob("*.parquet")
    record = read_record(path)
    assert run.returncode == 130, errors
    assert "Interrupted" in output
    assert not record.complete
    assert any(row["phase"] == "measure" for row in record.row_dicts)
    assert len(servers) == 2
    assert not any(server.is_running() for server in servers)


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="program-not-found: llama-server")
def test_llama_server_runs_by_its_recipe(bench: Bench) -> None:
    answer = bench("--arms", "ours:via=http", "--arms", "llama.cpp:recipe=llama-server", "--starts", "1", "--json")

    document = json.loads(answer.stdout)
    told = {arm["name"]: arm for arm in document["arms"]}
    assert (told["llama.cpp"]["served_by"], told["llama.cpp"]["recipe"]) == ("llama-server", "llama-server")
    assert told["llama.cpp"]["prompt_as"] == "token ids"
