"""docs/add-a-model.md is followed word for word, in a copy of the families' folder."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.models import families, registry
from tests.parity import oracle_files
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.oracle_files import who_made

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
FAMILIES = Path("pocketllm/engine/models/families")


def block(language: str, part: str) -> str:
    """The one block of this language that holds a part."""
    found = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    [text] = [text for text in found if part in text]
    return text


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's family, made by its commands and found like every other."""
    (tmp_path / FAMILIES).mkdir(parents=True)
    shutil.copy(ROOT / FAMILIES / "qwen2.py", tmp_path / FAMILIES)
    [copying] = [line.removeprefix("$ ") for line in GUIDE.splitlines() if line.startswith("$ sed ")]
    subprocess.run(copying, shell=True, check=True, cwd=tmp_path)
    (tmp_path / "toy.patch").write_text(block("diff", "toy.py"))
    subprocess.run(["git", "apply", "--recount", "toy.patch"], check=True, cwd=tmp_path)
    (tmp_path / FAMILIES / "qwen2.py").unlink()
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / FAMILIES)])
    registry.known_architectures.cache_clear()
    yield tmp_path
    sys.modules.pop(f"{families.__name__}.toy", None)
    registry.known_architectures.cache_clear()


def test_the_family_of_the_guide_passes_the_tests_of_the_guide(toy: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(block("python", "def textbook"), "docs/add-a-model.md", "exec"), names)
    whole = names["test_toy_agrees_with_the_textbook_however_the_prompt_is_chunked"]

    for size in (40, 7, 1):
        whole(toy, size)
    names["test_a_scale_that_is_forgotten_is_seen"](toy)
    names["test_a_scale_that_is_no_number_is_a_reason"](toy)


def test_the_oracle_of_the_guide_is_kept_with_its_maker_and_agrees(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_files, "ORACLES", toy)
    exec(compile(block("python", "def textbook"), "docs/add-a-model.md", "exec"), {"__name__": "__main__"})
    kept = np.load(toy / "toy.npz")
    ids = kept["input_ids"].tolist()
    [got] = Driver(toy / "toy.gguf").run([ids], chunks(len(ids), 20))

    assert who_made(kept) == ("textbook of test_toy.py", "1")
    assert nmse(got, kept["logits"]) <= 1e-9


def test_the_family_of_the_guide_passes_the_linter(toy: Path) -> None:
    settings = ROOT / "pyproject.toml"
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(settings), str(toy / FAMILIES / "toy.py")]
        subprocess.run(command, check=True, capture_output=True)


def test_the_toy_family_runs_like_any_other(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(toy)
    source = block("python", "from pocketllm import LLM").replace('TinyFamily("qwen2")', 'TinyFamily("toy")')

    exec(compile(source, "docs/add-a-model.md", "exec"), {})
