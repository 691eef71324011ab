"""Print a table: fitted to a terminal, whole where there is none."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNBOUNDED = 100_000
"""Columns; more than any row of ours has."""


def print_table(console: "Console", table: "Table") -> None:
    """Print it with nothing cut where no terminal bounds it: into a pipe or a file, unless COLUMNS says how wide."""
    if console.is_terminal or os.environ.get("COLUMNS"):
        console.print(table)
        return
    table.expand = False
    before = console.width
    wanted = console.measure(table, options=console.options.update(width=UNBOUNDED)).maximum
    console.width = max(before, wanted)
    console.print(table)
    console.width = before
