"""Write docs/cli.md from the commands themselves: `python -m tests.docs.cli_pages docs/cli.md`."""

import inspect
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from pocketllm.cli.main import app

HEADER = """# Command line

Generated from the commands by `make docs`; a test compares it with them. Exit codes, for all commands: 0 done ·
1 a check or a gate said no · 2 cannot be done as asked · 3 could not judge · 4 unrecorded or under-powered
under `--require` · 5 stale fixtures · 70 a bug of ours · 130 interrupted.
"""


def cli_page() -> str:
    """The whole page as Markdown, independent of terminal width and of the versions of typer and rich."""
    return HEADER + "".join(section(path, command) for path, command in walk(typer.main.get_command(app), "pocketllm"))


def walk(command: Any, path: str) -> list[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    return [(path, command), *(found for name in children for found in walk(children[name], f"{path} {name}"))]


def section(path: str, command: Any) -> str:
    parts = [f"\n## `{path}`", *paragraphs(command.help), *paragraphs(command.epilog)]
    rows = [row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        parts.append("\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def paragraphs(text: str | None) -> list[str]:
    """Help text as Markdown: indented lines are commands or output and become a block of their own."""
    found = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text or "").replace("\b", "").replace("\f", "").strip("\n")):
        for is_block, lines in groupby(part.splitlines(), key=lambda line: line.startswith("  ")):
            body = "\n".join(lines)
            found.append(f"```text\n{inspect.cleandoc(body)}\n```" if is_block else body)
    return [part for part in found if part.strip()]


def row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    meaning = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    return f"| {names} | {shown_default(parameter)} | {meaning} |"


def shown_default(parameter: Any) -> str:
    words = getattr(parameter, "show_default", None)
    if isinstance(words, str):
        return words
    default = parameter.default
    is_said = default is not None and default is not False and default not in ((), []) and not callable(default)
    return f"`{default}`" if is_said and "Sentinel" not in type(default).__name__ else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(cli_page(), encoding="utf-8")
