"""Write docs/cli.md from the commands themselves: `python -m tests.docs.cli_pages docs/cli.md`."""

import inspect
import sys
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
    text = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "")
    rows = "".join(row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False))
    table = f"\n| option | default | meaning |\n| --- | --- | --- |\n{rows}" if rows else ""
    epilog = f"\n{inspect.cleandoc(command.epilog)}\n" if command.epilog else ""
    return f"\n## `{path}`\n\n{text}\n{epilog}{table}"


def row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default in (None, (), [], False) or callable(default) else f"`{default}`"
    meaning = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    return f"| {names} | {shown} | {meaning} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(cli_page(), encoding="utf-8")
