"""Docs run: every python block is executed, every pocketllm command line exists, the command page is current."""

import doctest
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from pocketllm.cli.main import app
from tests.docs.cli_pages import cli_page
from tests.docs.example_page import EXAMPLE, example_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "pocketllm").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def blocks(language: str) -> list[tuple[Path, str]]:
    return [
        (page, text)
        for page in PAGES
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def command_lines() -> list[tuple[Path, str]]:
    """Lines of console and sh blocks that call pocketllm, continuation lines joined."""
    lines = []
    for language in ("console", "sh"):
        for page, text in blocks(language):
            for line in text.replace("\\\n", " ").splitlines():
                call = line.removeprefix("$ ").strip()
                if call.startswith("pocketllm "):
                    lines.append((page, call))
    return lines


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_a_module_are_true(module: str) -> None:
    result = doctest.testmod(import_module(module))

    assert (result.failed, result.attempted > 0) == (0, True)


def test_the_command_page_is_what_the_commands_say() -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == cli_page(), "run `make docs`"


def test_the_example_of_a_report_is_what_the_report_is() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == example_page(), "run `make docs`"


@pytest.mark.parametrize(("page", "line"), command_lines(), ids=lambda value: getattr(value, "name", value))
def test_a_command_line_in_the_docs_is_one_that_exists(page: Path, line: str) -> None:
    command = above = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, above = command.commands[words.pop(0)], command
    # a command that passes on what it does not know takes the flags of the one above it, too
    passed_on = above.params if command.context_settings.get("ignore_unknown_options") else []
    parameters = [*command.params, *passed_on]
    known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    pipe = words.index("|") if "|" in words else len(words)

    unknown = [
        word for word in words[:pipe] if word.startswith("-") and word != "-" and word.split("=")[0] not in known
    ]

    assert unknown == [], f"{page.name}: {line}"
    assert words or not hasattr(command, "commands") or command.invoke_without_command


@pytest.mark.model
@pytest.mark.parametrize(
    ("page", "source"), blocks("python"), ids=lambda value: getattr(value, "name", None) or "block"
)
def test_a_python_block_in_the_docs_runs(
    page: Path, source: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(source, str(page), "exec"), {"__name__": "__docs__"})
