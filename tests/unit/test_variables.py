"""Variables of the environment: every one that is read is known, and one that is not is told of."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.engine.options import BESIDE_OPTIONS, known_variables, warnings_of

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"""["'$`{]{1,2}(POCKETLLM_[A-Z_]*[A-Z])\b""")
AT_A_BUILD = {"POCKETLLM_ISAS", "POCKETLLM_SANITIZE"}
"""CMake's, given as -D: no variables of the environment."""


def named(path: Path) -> set[str]:
    return set(NAME.findall(path.read_text(encoding="utf-8")))


def test_every_variable_that_code_or_a_page_names_is_known() -> None:
    files = [*ROOT.glob("pocketllm/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "Makefile"]
    files += [*ROOT.glob(".ci/*"), ROOT / "hatch_build.py"]
    found = {name: path.name for path in files if path.is_file() for name in named(path)}
    doctest = {"POCKETLLM_BACKND"}

    assert {name: where for name, where in found.items() if name not in known_variables()}.keys() <= (
        AT_A_BUILD | doctest
    )
    assert set(BESIDE_OPTIONS) - {"POCKETLLM_CHAT_TEMPLATES"} <= set(found)


def test_a_misspelt_variable_is_told_once_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_BACKND", "reference")
    ended = CliRunner().invoke(app, ["bench", "recipes"])

    assert ended.stderr == (
        "warning: POCKETLLM_BACKND is no variable that pocketllm reads, and does nothing: "
        "did you mean POCKETLLM_BACKEND?\n"
    )
    assert "warning" not in ended.stdout


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("POCKETLLM_THREAD", "POCKETLLM_THREADS"),
        ("POCKETLLM_KVDTYPE", "POCKETLLM_KV_DTYPE"),
        ("POCKETLLM_API_KEYS", "POCKETLLM_API_KEY"),
        ("POCKETLLM_threads", "POCKETLLM_THREADS"),
        ("POCKETLLM_CACHE_DIR", "POCKETLLM_CACHE"),
        ("POCKETLLM_XYZZY", None),
        ("POCKETLLM_", None),
    ],
)
def test_the_variable_that_was_meant_is_named_where_one_is_near(name: str, meant: str | None) -> None:
    [sentence] = warnings_of([name, "PATH", "POCKETLLM"])

    assert sentence == f"{name} is no variable that pocketllm reads, and does nothing" + (
        f": did you mean {meant}?" if meant else ""
    )


def test_nothing_is_told_of_known_variables_and_of_a_cluster_s() -> None:
    cluster = ["POCKETLLM_SERVICE_HOST", "POCKETLLM_SERVICE_PORT", "POCKETLLM_SERVICE_PORT_HTTP", "POCKETLLM_PORT"]
    cluster += ["POCKETLLM_PORT_8000_TCP", "POCKETLLM_PORT_8000_TCP_ADDR"]

    assert warnings_of([*known_variables(), *cluster]) == []
