"""`golden review`: what a page shows, what the keys do on a real pseudo-terminal, and what is printed without one."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.golden.files.document import answer_document
from pocketllm.golden.files.fields import render
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import Answer
from pocketllm.golden.reports.review import Proposed, page, proposals, sentence
from pocketllm.golden.served_path import pocketllm_command
from tests.golden.workshop import GREEDY, opened, record_cases
from tests.unit.test_golden_fixture import ANSWER, CHAT, KEY, folder_with

TURNED = replace(
    ANSWER,
    expected=replace(ANSWER.expected, token_ids=(5, 8, 7), text="Par\x1b[2J is it"),
    provenance={**ANSWER.provenance, "commit": "d" * 40},
    soft={"device": "another cpu", "torch": "2.13.0"},
)


def shown(new: Answer, old: Answer | None = ANSWER, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # the console writes to it until the test ends
    console.print(page(Proposed(CHAT, CHAT, new, old), lambda token_id: f"<{token_id}>"))
    return console.export_text()


def test_a_page_aligns_the_first_divergence_and_tells_what_it_cost() -> None:
    text = shown(TURNED)

    assert "tokens differ from 1 on" in text
    [line] = [line for line in text.splitlines() if "▶" in line]
    assert line.split() == ["▶", "1", "6", "'<6>'", "0.250", "8", "'<8>'", "0.250"]
    assert re.search(r"margin +█+░+ 0\.2500 nat", text)
    assert re.search(r"regret +█+░+ 0\.2500 nat", text)
    assert "device some cpu → another cpu" in text
    assert "commit None → dddddddddddd" in text
    assert "torch" not in text.partition("fingerprint")[2]


def test_a_page_fits_80_columns_and_cannot_command_a_terminal() -> None:
    text = shown(TURNED)

    assert "\x1b" not in text
    assert "\\x1b" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_a_proposal_is_is_said_in_a_sentence() -> None:
    close = replace(ANSWER, positions=tuple(replace(one, margin=1e-6) for one in ANSWER.positions))
    near = replace(close, positions=(close.positions[0], replace(close.positions[1], top_logprobs=(-0.5, -0.5))) * 2)

    assert sentence(Proposed(CHAT, CHAT, ANSWER, None)) == "first answer for cpu-reference"
    assert sentence(Proposed(CHAT, CHAT, ANSWER, ANSWER)) == "the same tokens"
    assert sentence(Proposed(CHAT, CHAT, TURNED, ANSWER)) == "tokens differ from 1 on"
    assert sentence(Proposed(CHAT, CHAT, TURNED, near)).endswith("a tie")


def test_a_changed_request_is_shown(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    longer = replace(CHAT, sampling={**CHAT.sampling, "max_tokens": 9})
    folder.write_case(longer)
    folder.write_answer(replace(ANSWER, request_sha256=longer.request_sha256))

    [one] = proposals(folder, KEY)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # the console writes to it until the test ends
    console.print(page(one, str))

    assert "the request was changed" in (text := console.export_text())
    assert "sampling" in text


# -- in a terminal -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def recorded(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> FixtureFolder:
    """Three proposals beside their accepted answers, made by clean code, outside any checkout."""
    names = ("one", "three", "two")
    table = {"prompt": "once upon", "sampling": {"max_tokens": 6, **GREEDY}, "paths": ["in_process"]}
    with opened(tiny_gguf) as engine:
        folder = record_cases(engine, tmp_path_factory.mktemp("recorded"), dict.fromkeys(names, table))
    for name in names:
        answer = folder.answers(name)[0]
        other = replace(answer.expected, token_ids=(*answer.expected.token_ids[:-1], 7), text="other")
        (folder.path / f"{name}.cpu-reference.json.pending").write_text(
            render(answer_document(replace(answer, expected=other)))
        )
    return folder


@pytest.fixture
def pending(recorded: FixtureFolder, tmp_path: Path) -> FixtureFolder:
    """A copy to be decided on."""
    return FixtureFolder(copytree(recorded.path, tmp_path / "goldens" / recorded.path.name))


class Terminal:
    """`pocketllm golden review` on a pseudo-terminal of 80 by 30."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
        for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            pocketllm_command("golden", "review", *words),
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        self._answered = 0

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until the text has come since the last key was pressed."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen[self._answered :]:
            assert time.monotonic() < deadline, self.seen[self._answered :]
            self._read(0.1)

    def _read(self, timeout_s: float) -> None:
        if select.select([self._ours], [], [], timeout_s)[0]:
            try:
                self.seen += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:
                return

    def press(self, keys: str) -> None:
        self._answered = len(self.seen)
        os.write(self._ours, keys.encode())

    def end(self) -> tuple[int, str]:
        """Exit code, and what was said on stderr."""
        _, errors = self._process.communicate(timeout=60)
        os.close(self._ours)
        return self._process.returncode, errors.decode()


@pytest.fixture
def words(tiny_gguf: Path, pending: FixtureFolder) -> list[str]:
    if sys.platform == "win32":
        pytest.skip("no-pseudo-terminal: windows")
    return ["--model", str(tiny_gguf), "--backend", "reference", "--fixtures", str(pending.path.parent)]


def test_each_key_decides_one_proposal(words: list[str], pending: FixtureFolder) -> None:
    terminal = Terminal(*words)
    terminal.wait_for("1 of 3")
    terminal.wait_for("[q]uit")
    terminal.press("x")
    terminal.wait_for("is no key here")
    terminal.press("a")
    terminal.wait_for("reason:")
    terminal.press("read and right\r")
    terminal.wait_for("2 of 3")
    terminal.press("r")
    terminal.wait_for("3 of 3")
    terminal.press("s")
    code, said = terminal.end()

    assert code == 0, said
    assert "1 accepted (one); 1 rejected (three); 1 skipped (two)" in said
    assert pending.pending_names() == ["two"]
    assert [pending.answers(name)[0].expected.text == "other" for name in ("one", "three", "two")] == [
        True,
        False,
        False,
    ]
    assert pending.answers("one")[0].provenance["reason"] == "read and right"


def test_capital_keys_decide_all_and_q_decides_nothing(words: list[str], pending: FixtureFolder) -> None:
    leaving = Terminal(*words)
    leaving.wait_for("1 of 3")
    leaving.press("q")
    assert leaving.end() == (0, "3 left\n")

    everything = Terminal(*words, "--reason", "all read")
    everything.wait_for("1 of 3")
    everything.press("A")
    code, said = everything.end()

    assert (code, pending.pending_names()) == (0, [])
    assert "3 accepted" in said


def test_without_a_terminal_pages_are_printed_and_nothing_is_decided(words: list[str], pending: FixtureFolder) -> None:
    done = CliRunner().invoke(app, ["golden", "review", *words])

    assert done.exit_code == 0, done.output
    assert done.stdout.count("tokens differ from 5 on") == 3
    assert "nothing is decided here" in done.stderr
    assert done.stderr.rstrip().endswith(f'--reason "…" {" ".join(joined(words))}')
    assert pending.pending_names() == ["one", "three", "two"]


def joined(words: list[str]) -> list[str]:
    return [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]


def test_a_case_that_nobody_has_is_refused_and_not_called_reviewed(words: list[str], pending: FixtureFolder) -> None:
    done = CliRunner().invoke(app, ["golden", "review", *words, "--case", "four"])

    assert done.exit_code == 2, done.output
    assert "no case 'four'" in done.stderr
    assert "known: one, three, two" in done.stderr
