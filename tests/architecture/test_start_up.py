"""Help is instant because nothing heavy is imported for it."""

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


@pytest.mark.parametrize("path", command_paths(), ids=lambda path: " ".join(path) or "pocketllm")
def test_help_imports_nothing_heavy(path: list[str]) -> None:
    program = (
        "import sys\n"
        "from pocketllm.cli.main import app\n"
        f"try:\n    app({[*path, '--help']!r}, standalone_mode=False)\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )

    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "Usage" in answer.stdout, answer.stderr
    assert answer.stdout.rstrip().endswith("HEAVY []")


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = f"import sys, pocketllm; print([name for name in {HEAVY!r} if name in sys.modules])"

    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "[]"
