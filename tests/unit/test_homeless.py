"""A user without a home folder, as in many containers: what needs none works, what needs one says what to set."""

import pwd
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pocketllm.cli.main import app
from pocketllm.errors import RecordError
from pocketllm.evidence.store import folders, record_dir


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_DATA_HOME", "POCKETLLM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_a_path_is_run_and_records_are_listed(tiny_gguf: Path) -> None:
    generated = command("generate", "hi", "-m", str(tiny_gguf), "--max-tokens", "2", "--temperature", "0")

    assert (generated.exit_code, command("records", "ls").exit_code) == (0, 0)
    assert generated.stdout.strip()


@pytest.mark.parametrize("words", [("models", "ls"), ("models", "pull", "smollm2-135m"), ("generate", "hi")])
def test_a_model_of_the_cache_asks_for_a_folder_in_a_sentence(words: tuple[str, ...]) -> None:
    refused = command(*words)

    assert refused.exit_code == 2
    assert refused.stderr == "error: there is no home folder to keep models in: set POCKETLLM_CACHE to a folder\n"


def test_records_that_cannot_be_written_here_have_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise RecordError(f"cannot write records to {folder.name}")

    monkeypatch.setattr(folders, "prove_writable", refuse)
    with pytest.raises(RecordError, match="cannot write records to local"):
        record_dir()


def test_the_home_of_a_user_who_is_not_there_is_no_checkout() -> None:
    refused = command("bench", "--arms", "a:path=~nobody-of-this-name/x", "--plan")

    assert (refused.exit_code, refused.stderr.count("is no checkout of pocketllm")) == (2, 1)
