"""The recipes of docs/ci.md are YAML, and their gate compares two checkouts as it says; planned here, not run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from pocketllm.cli.main import app
from tests.tiny import write_llama

ROOT = Path(__file__).resolve().parents[2]
RECIPES = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "ci.md").read_text(encoding="utf-8"), re.M | re.S)


def scripts(value: Any) -> Iterator[str]:
    """Shell text of every `run` and `script` of a recipe."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in ("run", "script"):
            yield from [item] if isinstance(item, str) else item
        else:
            yield from scripts(item)


def lines(recipe: str) -> list[list[str]]:
    """Words of every command of a recipe."""
    text = "\n".join(scripts(yaml.safe_load(recipe)))
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def gate_words(recipe: str) -> list[str]:
    """What follows `pocketllm bench gate`."""
    [words] = [words for words in lines(recipe) if "gate" in words]
    assert words[0].endswith(".venv/bin/pocketllm")
    assert words[1:3] == ["bench", "gate"]
    return words[3:]


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkouts, `new` and `base`, that are not one and the same to git."""
    folder = tmp_path_factory.mktemp("runner")
    for name in ("new", "base"):
        (folder / name / "pocketllm").mkdir(parents=True)
        (folder / name / "pocketllm" / "__init__.py").write_text(f"# {name}\n")
    write_llama(folder / "tiny.gguf")
    return folder


def test_there_is_a_recipe_for_each_of_the_two() -> None:
    github, gitlab = map(yaml.safe_load, RECIPES)

    assert "jobs" in github
    assert "script" in gitlab["benchmark"]


@pytest.mark.parametrize(("recipe", "place"), list(zip(RECIPES, (".", "new"), strict=True)), ids=["github", "gitlab"])
def test_a_recipe_s_gate_would_run_both_checkouts_interleaved_with_a_null_arm(
    recipe: str, place: str, checkouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkouts / place)
    words = gate_words(recipe)
    own = {name for parameter in gate_command().params for name in parameter.opts}
    for flag in ("--junit", "--record-dir"):
        assert flag in own
        index = words.index(flag)
        del words[index : index + 2]
    answer = CliRunner().invoke(app, ["bench", *words, "--plan", "--json", "--model", str(checkouts / "tiny.gguf")])

    assert answer.exit_code == 0, answer.output
    plan = yaml.safe_load(answer.stdout)
    assert [arm["name"] for arm in plan["arms"]] == ["base", "new", "null"]
    assert plan["isolation"] == "process"
    assert all(sorted(row) == ["base", "new", "null"] for row in plan["schedule"])
    assert len({tuple(row) for row in plan["schedule"]}) > 2


def gate_command() -> Any:
    """The gate's own parameters."""
    return get_command(app).commands["bench"].commands["gate"]  # type: ignore[attr-defined]  # groups have commands


@pytest.mark.parametrize("recipe", RECIPES, ids=["github", "gitlab"])
def test_every_make_target_of_a_recipe_exists(recipe: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make-not-installed")
    targets = [words[-1] for words in lines(recipe) if words[0] == "make"]
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))

    assert targets
    assert set(targets) <= known
