"""What every command says and does around its work: output with nowhere to go, interruptions, warnings, notes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pocketllm import SamplingParams
from pocketllm import __main__ as program
from pocketllm.cli import generate
from pocketllm.cli.loading import LoadingBar, progress_text
from pocketllm.cli.main import app
from pocketllm.cli.output import STANDING_BARS, fail
from pocketllm.engine.backends import select
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import OptionError, UnsupportedFeatureError
from tests.parity.tiny_families import TinyFamily, write_family

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="dev-full-missing")
@pytest.mark.parametrize("words", [["models", "--json"], ["--help"], ["--version"]])
def test_a_full_disk_is_one_sentence_and_exit_code_2(words: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pocketllm", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the output: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="dev-full-missing")
@pytest.mark.parametrize(("words", "code"), [(["bench", "recipes"], 0), (["bench", "--arms", "a b"], 2)], ids=str)
def test_a_full_disk_under_stderr_changes_no_outcome(words: list[str], code: int) -> None:
    environment = {**os.environ, "POCKETLLM_BACKND": "told of on stderr"}
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pocketllm", *words],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
            env=environment,
        )

    assert (done.returncode, "llama-server" in done.stdout) == (code, code == 0)


def test_a_refusal_that_quotes_a_file_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    fail(UnsupportedFeatureError("cannot run a (\x1b[31mred\x00)", ["\x9bone", "two\nthree"]))
    fail(OptionError("no file 'mod\xe8le \u202e.gguf'"))

    assert capsys.readouterr().err.splitlines() == [
        "error: cannot run a (\\x1b[31mred\\x00):",
        "  - \\x9bone",
        "  - two",
        "three",
        "error: no file 'mod\xe8le \\u202e.gguf'",
    ]


@pytest.mark.model
def test_a_warning_is_one_line_of_advice_without_a_place_in_our_code(smollm2: Path) -> None:
    words = ["generate", "a\x04b", "--model", str(smollm2), "--max-tokens", "1"]

    done = subprocess.run(
        [sys.executable, "-m", "pocketllm", *words], capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "0x04" in line]
    assert line == "warning: the vocabulary has no token for byte 0x04: it is missing from the prompt"


def test_an_error_of_usage_is_a_whole_line_without_color_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    told = CliRunner().invoke(app, ["bench", "--no-such-" + "x" * 100])

    assert told.exit_code == 2
    assert f"Error: No such option: --no-such-{'x' * 100}" in told.stderr.split("\n")
    assert "\033" not in told.stderr


def test_closed_standard_streams_lead_nowhere_instead_of_failing() -> None:
    shell = f'"{sys.executable}" -m pocketllm models --json'

    no_output = subprocess.run(f"{shell} <&- >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False)
    no_errors = subprocess.run(f"{shell} 2>&-", shell=True, stdout=subprocess.PIPE, text=True, check=False)

    assert (no_output.returncode, no_output.stderr) == (0, "")
    assert no_errors.returncode == 0
    assert json.loads(no_errors.stdout)


def left_alone(*words: str, stream: str) -> int:
    """The exit code of a command whose `stdout` or `stderr` nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: unread}
        command = [sys.executable, "-m", "pocketllm", *words]
        return subprocess.run(command, **streams, check=False, timeout=120, env={**os.environ, "CI": "1"}).returncode


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves_takes_no_verdict_with_it(stream: str, as_json: list[str], tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", TinyFamily("llama"))
    verify = ["golden", "verify", "-m", str(path), "--fixtures", str(tmp_path), *as_json]

    assert left_alone(*verify, stream=stream) == 4
    assert left_alone(*verify, "--no-require", stream=stream) == 0
    assert left_alone("check", "-m", str(path), "--max-model-len", "99999", *as_json, stream=stream) == 2


@pytest.mark.parametrize("words", [["models"], ["--help"], ["bench", "recipes"], ["golden", "verify", "--help"]])
def test_a_list_or_a_help_page_whose_reader_leaves_is_no_failure(words: list[str]) -> None:
    assert left_alone(*words, stream="stdout") == 0


@pytest.mark.parametrize("place", ["nowhere/golden.xml", ""], ids=["no folder", "a folder"])
def test_a_file_that_cannot_be_written_in_the_end_is_refused_in_the_beginning(place: str, tmp_path: Path) -> None:
    junit = str(tmp_path / place)
    gate = CliRunner().invoke(app, ["bench", "gate", "--junit", junit, "--arms", "a", "--model", "nope.gguf"])
    verify = CliRunner().invoke(app, ["golden", "verify", "--junit", junit, "--model", "nope.gguf"])

    assert (gate.exit_code, verify.exit_code) == (2, 2)
    assert gate.stderr.startswith(f"error: cannot write --junit {junit}: ")
    assert verify.stderr == gate.stderr


def test_a_working_directory_that_is_gone_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && "{sys.executable}" -m pocketllm records ls'
    environment = {**os.environ, "PYTHONPATH": str(Path(program.__file__).parents[1])}
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False, env=environment)

    assert (done.returncode, done.stderr) == (
        2,
        "error: the working directory is gone: change to one that is there\n",
    )


def test_ctrl_c_while_commands_are_imported_is_one_word_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "pocketllm.cli.main", SimpleNamespace(app=interrupt))
    with pytest.raises(SystemExit) as ended:
        program.main()

    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_answer_from_the_slow_backend_says_so_unless_it_was_asked_for(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_family(tmp_path / "tiny.gguf", TinyFamily("llama"))
    monkeypatch.setattr(select, "offers", lambda wanted, wishes: [b for b in select.bids() if b.name == "reference"])
    params = SamplingParams(max_tokens=1, temperature=0)
    options = EngineOptions(model=str(path), backend=backend)
    generate.run(options, "hello", params, as_json=False, show=False, verbose=False)

    said = capsys.readouterr().err
    assert said.startswith("note: backend auto chose reference") if backend == "auto" else said == ""


def test_how_far_a_model_is_loaded_is_told_in_units_of_its_size() -> None:
    assert progress_text(42_000_000, 145_000_000) == "loaded 42.0 of 145.0 MB"
    assert progress_text(42_000_000, 1_460_000_000) == "loaded 0.0 of 1.5 GB"


def test_a_bar_that_stands_in_a_terminal_can_be_taken_away_by_whoever_ends_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with LoadingBar() as bar:
        bar.draw(1, 2)
        assert bar in STANDING_BARS
        for one in STANDING_BARS.copy():
            one.stop()
        assert not STANDING_BARS
        hidden, shown = "\x1b[?25l", "\x1b[?25h"
        told = capsys.readouterr().err
        assert -1 < told.rindex(hidden) < told.rindex(shown)
