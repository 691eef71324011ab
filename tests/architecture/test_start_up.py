"""Help is instant because nothing heavy is imported for it."""

import json
import subprocess
import sys

import pytest
import typer

from pocketllm.cli.main import app

HEAVY = ("torch", "pandas", "pyarrow", "transformers", "scipy", "fastapi", "uvicorn", "tokenizers")


def command_paths() -> list[list[str]]:
    """Every command and subcommand, the app itself included."""

    def walk(command: object, path: list[str]) -> list[list[str]]:
        children = getattr(command, "commands", {})
        return [path, *(found for name, child in children.items() for found in walk(child, [*path, name]))]

    return walk(typer.main.get_command(app), [])


PATHS = command_paths()
ASK_ALL = f"""
import contextlib, io, json, sys
from pocketllm.cli.main import app

told, before = [], set()
for path in {PATHS!r}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            code = app([*path, "--help"], prog_name="pocketllm", standalone_mode=False)
        except SystemExit as end:
            code = end.code
    heavy = {set(HEAVY)!r} & set(sys.modules)
    told.append((said.getvalue(), code or 0, sorted(heavy - before)))
    before = heavy
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[str, int, list[str]]]:
    """What each command's help says, its exit code and the heavy modules it imports; one process for all of them."""
    answer = subprocess.run([sys.executable, "-c", ASK_ALL], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return dict(zip(map(" ".join, PATHS), map(tuple, json.loads(answer.stdout)), strict=True))


@pytest.mark.parametrize("path", list(map(" ".join, PATHS)), ids=lambda path: path or "pocketllm")
def test_help_imports_nothing_heavy(path: str, helps: dict[str, tuple[str, int, list[str]]]) -> None:
    text, code, heavy = helps[path]

    assert (code, heavy) == (0, [])
    assert f"Usage: pocketllm {path}".rstrip() in text


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = f"import sys, pocketllm; print([name for name in {HEAVY!r} if name in sys.modules])"

    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "[]"
