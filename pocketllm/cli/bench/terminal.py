"""How colorful a bench report may be where it is printed."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocketllm.bench.reports.text import Paint


def paint() -> "Paint":
    """Color on a terminal that wants it (NO_COLOR, TERM=dumb), or anywhere with FORCE_COLOR; else none."""
    from pocketllm.bench.reports.text import colored, plain

    wanted = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return colored if (wanted or os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR") else plain


def show(text: str) -> None:
    """Print a report; its color has been decided, so a pipe does not take it away again."""
    import typer

    typer.echo(text, color=True)
