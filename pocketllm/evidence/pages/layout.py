"""Titled paragraphs, facts and aligned tables: fitted to a terminal, and in a pipe each line whole, however long."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 80
UNBOUNDED = 100_000
"""Columns where nothing bounds a line: more than any of ours has."""
INDENT = "  "


def section(title: str, lines: Sequence[str]) -> list[str]:
    """A titled paragraph; nothing when it has no lines."""
    return ["", title, *lines] if lines else []


def facts(*pairs: tuple[str, Any]) -> list[str]:
    """`name  value` lines, wrapped under the value; pairs without a value are left out."""
    lines: list[str] = []
    width = max([16, *(len(name) for name, _ in pairs)])
    for name, value in pairs:
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
        if text:
            lines += fold(text, f"{INDENT}{name:<{width}}  ", INDENT + " " * (width + 2))
    return lines


def wrap(text: str) -> list[str]:
    """One item, wrapped with a hanging indent."""
    return fold(text, INDENT, INDENT * 2)


def fold(text: str, first: str, rest: str) -> list[str]:
    """A text in lines of 80, cut between words only: names and paths stay whole, to be copied, even where longer.

    In a pipe it is one line, or a search through it would miss a sentence that goes over two.
    """
    if columns() is None:
        return [f"{first}{' '.join(text.split())}"] if text.strip() else []
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def join_pairs(values: Any, separator: str = "=", skip: Sequence[str] = ()) -> str:
    """`a=1, b=2` of a mapping; empty for anything else."""
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{name}{separator}{value}" for name, value in values.items() if name not in skip)


def number(value: Any, form: str) -> str:
    """A number in the given form; empty when absent."""
    return format(value, form) if isinstance(value, (int, float)) else ""


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], indent: str = INDENT) -> list[str]:
    """Aligned columns, those without any value left out; nothing without rows.

    Where they are wider than `columns` the widest are cut with `…`.
    """
    if not rows:
        return []
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    shown = [column for column in range(len(names)) if any(row[column] for row in cells)]
    grid = [[names[column] for column in shown], *([row[column] for column in shown] for row in cells)]
    widths = [max(len(row[place]) for row in grid) for place in range(len(shown))]
    room = columns()
    while room and sum(widths) + 2 * (len(widths) - 1) + len(indent) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return [
        indent + "  ".join(cut(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid
    ]


def columns() -> int | None:
    """Most columns of a line: what COLUMNS says, else the terminal's own, at least 80; None: a pipe takes it whole.

    A program that reads it, or a search through it, would miss what is cut.
    """
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return max(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def cut(text: str, width: int) -> str:
    """A text in exactly so many columns."""
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def printable(line: str) -> str:
    """A line that cannot steer a terminal, whoever wrote the record."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
