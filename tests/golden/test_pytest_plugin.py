"""The pytest plugin in a pytest inside this one: what is collected, what passes, fails and is skipped, and why."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from pocketllm.golden.files.folder import FixtureFolder
from tests.golden.workshop import GREEDY, opened, record_cases

pytest_plugins = ["pytester"]

Run = Callable[..., tuple[int, str]]
CASES = {
    "greedy": {
        "prompt": "once upon",
        "sampling": {"max_tokens": 6, **GREEDY},
        "paths": ["in_process", "http_completions"],
    },
    "draw": {
        "prompt": "once upon",
        "sampling": {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True},
        "paths": ["in_process"],
    },
}


@pytest.fixture(scope="module")
def recorded(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> FixtureFolder:
    with opened(tiny_gguf) as engine:
        return record_cases(engine, tmp_path_factory.mktemp("recorded"), CASES)


@pytest.fixture
def folder(recorded: FixtureFolder, tmp_path: Path) -> FixtureFolder:
    """A copy to be spoiled."""
    return FixtureFolder(copytree(recorded.path, tmp_path / "goldens" / recorded.path.name))


@pytest.fixture
def run(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Exit code and output of `pytest --golden` in an empty folder, with this plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*words: str) -> tuple[int, str]:
        plugin = ["-p", "pocketllm.golden.pytest_plugin", "-p", "no:cacheprovider", "-rs"]
        done = pytester.runpytest_inprocess(*plugin, "--golden", str(tmp_path / "goldens"), *words)
        return int(done.ret), f"{done.stdout}\n{done.stderr}"

    return run


def at(tiny_gguf: Path) -> list[str]:
    return ["--golden-model", f"llama={tiny_gguf}", "--golden-backend", "reference"]


def test_every_case_and_path_is_a_test_that_passes(folder: FixtureFolder, tiny_gguf: Path, run: Run) -> None:
    code, text = run(*at(tiny_gguf), "-v")

    assert code == 0, text
    assert "3 passed" in text
    assert "greedy[http_completions]" in text


def test_what_is_not_selected_is_not_asked(folder: FixtureFolder, tiny_gguf: Path, run: Run) -> None:
    code, text = run(*at(tiny_gguf), "-k", "draw")

    assert code == 0, text
    assert "1 passed, 2 deselected" in text


def test_another_answer_fails_with_its_outcome_and_no_traceback(
    folder: FixtureFolder, tiny_gguf: Path, run: Run
) -> None:
    file = folder.path / "greedy.cpu-reference.json"
    document = json.loads(file.read_text())
    document["expected"]["token_ids"][3] ^= 1
    file.write_text(json.dumps(document))

    code, text = run(*at(tiny_gguf), "-k", "in_process")

    assert code == 1, text
    assert "1 failed, 1 passed" in text
    assert "in_process tokens: REGRESSION: tokens at 3: expected" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--golden-model", "llama=nowhere.gguf"], "model-not-cached: llama"),
        (["--golden-backend", "reference"], "no-fixture-for-device: cpu-reference"),
    ],
)
def test_what_cannot_be_compared_is_skipped_with_its_reason_or_fails_where_required(
    folder: FixtureFolder, tiny_gguf: Path, run: Run, words: list[str], reason: str
) -> None:
    for file in folder.path.glob("*.cpu-reference.json"):
        file.unlink()
    where = ["--golden-model", f"llama={tiny_gguf}"] if "--golden-model" not in words else []

    code, text = run(*where, *words)
    required, told = run(*where, *words, "--golden-require", "-k", "draw")

    assert (code, required) == (0, 1), text + told
    assert reason in text
    assert reason in told


def test_a_broken_fixture_or_flag_is_one_sentence(folder: FixtureFolder, tiny_gguf: Path, run: Run) -> None:
    (folder.path / "greedy.json").write_text("{")

    for words, told in (([], "not valid JSON"), (["--golden-model", "x"], "must be NAME=PATH")):
        code, text = run(*(words or at(tiny_gguf)))
        assert code == 4, text
        assert told in text
        assert "INTERNALERROR" not in text


def test_the_plugin_is_registered_with_pytest() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))

    assert project["project"]["entry-points"]["pytest11"] == {"pocketllm_golden": "pocketllm.golden.pytest_plugin"}
