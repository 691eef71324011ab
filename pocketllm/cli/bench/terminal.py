"""How wide and how colorful a bench report may be where it is printed."""

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocketllm.bench.reports.text import Paint

PIPE_COLUMNS = 80


def paint() -> "Paint":
    """Color on a terminal that wants it (NO_COLOR, TERM=dumb), or anywhere with FORCE_COLOR; else none."""
    from pocketllm.bench.reports.text import colored, plain

    wanted = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return colored if (wanted or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR") else plain


def columns() -> int:
    """The terminal's width; 80 in a pipe."""
    return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns if sys.stdout.isatty() else PIPE_COLUMNS


def show(text: str) -> None:
    """Print a report; its color has been decided, so a pipe does not take it away again."""
    import typer

    typer.echo(text, color=True)
