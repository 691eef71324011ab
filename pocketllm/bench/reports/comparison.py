"""`--as TOOL` as text: a tool's numbers and ours side by side, then what each means."""

from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.bench.reports.series import Series
from pocketllm.bench.reports.text import NAME, Paint, clip, wrap
from pocketllm.bench.reports.views import CAVEATS, view
from pocketllm.bench.reports.words import figure

Row = Mapping[str, Any]


def render_view(series: Series, name: str, paint: Paint, width: int | None) -> str:
    """Numbers, definitions, and how the two differ in kind; says so where the record has nothing for it.

    width: columns of the definitions; None where nothing bounds them.
    """
    rows = view(series, name)
    if not rows:
        return f"as {name}: this record has no request to compute its numbers from"
    lines = [paint(f"{f'as {name}':<27} {'arm':<{NAME}} {name:>16} {'pocketllm':>16}", "bold")]
    for row in rows:
        at = f" at {row['point']}" if row["point"] else ""
        theirs = f"{figure(row['value'])} {row['unit']}"
        lines.append(f"{clip(row['name'] + at, 27):<27} {clip(row['arm'], NAME):<{NAME}} {theirs:>16} {ours(row):>16}")
    lines += ["", paint("what they mean", "bold"), *definitions(rows, width), "", wrap(CAVEATS[name], width)]
    return "\n".join(lines)


def ours(row: Row) -> str:
    """Our nearest number; its name stands with its definition."""
    if row["ours"] is None or row["ours_value"] is None:
        return "–"
    return f"{figure(row['ours_value'])} {row['ours_unit']}"


def definitions(rows: Sequence[Row], width: int | None) -> list[str]:
    """Each number's definition once, and ours beside it."""
    found: dict[str, str] = {}
    for row in rows:
        beside = f"; ours, {row['ours']}: {row['ours_definition']}" if row["ours"] else ""
        found.setdefault(row["name"], wrap(f"{row['name']}: {row['definition']}{beside}", width, "  "))
    return list(found.values())
