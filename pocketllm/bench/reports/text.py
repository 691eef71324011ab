"""From a record to text in 80 columns or more, sentences whole where nothing bounds them; measures nothing.

A forest table: the null arm on top, a bar for each interval, the margin as a band (░), the noise floor as ticks (╎).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.arm import Role
from pocketllm.bench.latency import is_token_by_token, metric_of
from pocketllm.bench.reports.operations import Line, ceiling_words, lines_of
from pocketllm.bench.reports.series import QUANTILES, Series
from pocketllm.bench.reports.words import (
    baseline_name,
    figure,
    headline,
    hides_ratio,
    judged_metrics,
    metric_words,
    notes,
    percent,
    results_of,
    sentences,
    short,
    shown,
)

WIDTH = 80
MAX_WIDTH = 132
NAME = 12
BAR = 17
"""Cells of a bar in WIDTH columns; a wider terminal gives its columns to the bar."""
MAX_LATENCY_POINTS = 2
"""With more points the page has the quantiles, and text the medians alone."""
QUANTILE_WIDTHS = {0.5: 9, 0.9: 13, 0.99: 15}
"""Columns of a quantile, or of why there is none."""

Document = Mapping[str, Any]
Paint = Callable[[str, str], str]
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
WORD_STYLES = {
    Word.INVALID: "red",
    Word.FASTER: "green",
    Word.SLOWER: "red",
    Word.SAME: "cyan",
    Word.SMALL: "yellow",
    Word.NOT_DISTINGUISHABLE: "yellow",
}


def plain(text: str, style: str) -> str:
    """No color."""
    return text


def colored(text: str, style: str) -> str:
    """ANSI color."""
    return f"\033[{STYLES[style]}m{text}\033[0m"


def render(document: Document, paint: Paint = plain, rows: Sequence[Document] = (), width: int | None = WIDTH) -> str:
    """The whole report of a bench record; with its rows, latencies and operations too.

    width: what a terminal has; None for a pipe, in which no sentence is broken.
    """
    fold = None if width is None else max(WIDTH, min(width, MAX_WIDTH))
    width = fold or WIDTH
    series = Series(document, rows)
    parts = [header(series, fold and WIDTH), forest(document, paint, width), rates(series, paint)]
    parts += [latencies(series, paint), operations(series, paint)]
    parts += ["\n".join(wrap(line, fold) for line in sentences(document))]
    parts += ["\n".join(wrap(f"note: {line}", fold, "  ") for line in notes(document))]
    return "\n\n".join(part for part in parts if part)


def header(series: Series, fold: int | None) -> str:
    """What was run; fold: the columns of its first line, None for any number."""
    document = series.document
    work, planned = document.get("workload") or {}, len(document.get("schedule") or ())
    parts = [f"{document.get('isolation', document.get('kind'))} · {series.num_blocks} of {planned} blocks"]
    parts[0] += f" × {len(series.arms)} arms"
    if work.get("requests_per_slot") is not None:
        parts[0] += f", measured requests a slot: {work['requests_per_slot']}"
    if "seed" in document:
        parts.append(f"seed {document['seed']}")
    return wrap(headline(document), fold) + "\n" + " · ".join(parts)


# -- the forest --------------------------------------------------------------------------------------------------------
def forest(document: Document, paint: Paint, width: int) -> str:
    """Every metric's ratios under one head, each with an axis of its own."""
    metrics = judged_metrics(document)
    if not metrics:
        return ""
    cells = BAR + width - WIDTH
    head = f"{'arm':<{NAME}} {'time':>7} {'95 % interval':^13} {'speed':>7} {'':{cells}} verdict"
    return "\n\n".join([paint(head, "dim")] + [metric_rows(document, metric, paint, cells) for metric in metrics])


def metric_rows(document: Document, metric: str, paint: Paint, cells: int) -> str:
    """Ratios of one metric: title and ruler, the null arm, the candidates."""
    results = results_of(document, metric)
    reach = reach_of(document, metric)
    title = f"{metric_words(metric)}, {metric_of(metric).unit} against {baseline_name(document)}"
    if not results[0]["primary"]:
        title = f"{metric_words(metric)} (not judged)"
    left, right = f"{math.exp(-reach):.3g}", f"{math.exp(reach):.3g}"
    before = cells // 2 - len(left)
    ruler = f"{left}{'1':>{before + 1}}{right:>{cells - cells // 2 - 1}}"
    lead = NAME + 7 + 13 + 7 + 4
    lines = [paint(f"{clip(title, lead - 1):<{lead}}", "bold") + paint(ruler, "dim")]
    lines += [table_row(document, result, reach, paint, cells) for result in results]
    return "\n".join(lines)


def table_row(document: Document, result: Document, reach: float, paint: Paint, cells: int) -> str:
    """One arm: ratio, interval, speed, bar, word."""
    name = clip(result["arm"], NAME)
    if hides_ratio(document, result):
        return f"{name:<{NAME}} {'–':>7} {'–':^13} {'–':>7} {'':{cells}} {word_of(result, paint)}".rstrip()
    interval = f"{short(result['low'])}–{short(result['high'])}"
    numbers = f"{short(result['ratio']) + '×':>7} {interval:^13} {short(1 / result['ratio']) + '×':>7}"
    style = WORD_STYLES[Word(result["verdict"])] if result.get("verdict") else "dim"
    drawn = paint_bar(bar(result, reach, cells), paint, style)
    return f"{name:<{NAME}} {numbers} {drawn} {word_of(result, paint)}".rstrip()


def word_of(result: Document, paint: Paint) -> str:
    """The verdict, or what stands in its place."""
    if result.get("verdict") is not None:
        return paint(result["verdict"], WORD_STYLES[Word(result["verdict"])])
    if result["role"] == Role.NULL.value and result.get("floor") is not None:
        return f"floor {percent(result['floor'])}"
    return ""


def reach_of(document: Document, metric: str) -> float:
    """Half the axis of a metric, the same at all its points; operations have little in common."""
    word = metric.partition("@")[0]
    same = {metric} if word == "op" else {name for name in judged_metrics(document) if name.partition("@")[0] == word}
    alike = [result for result in document["results"] if result["metric"] in same]
    return axis_reach([result for result in alike if not hides_ratio(document, result)])


def axis_reach(results: Sequence[Document]) -> float:
    """Half the axis, as a log ratio: it holds every interval, the floor and twice the margin."""
    ends = [abs(math.log(result[end])) for result in results for end in ("low", "high")]
    margins = [2 * math.log1p(result["margin"]) for result in results]
    floors = [1.2 * math.log1p(result["floor"]) for result in results if result.get("floor") is not None]
    return max([*ends, *margins, *floors, 0.01])


def bar(result: Document, reach: float, cells: int = BAR) -> str:
    """The interval on an axis of so many cells: estimate ●, interval ─, no difference │, margin ░, noise floor ╎."""

    def cell(log_ratio: float) -> int:
        return round((log_ratio / reach + 1) / 2 * (cells - 1))

    middle, margin = cells // 2, math.log1p(result["margin"])
    drawn = [" "] * cells
    for index in range(cell(-margin), cell(margin) + 1):
        drawn[index] = "░"
    if result.get("floor") is not None:
        for end in (-1, 1):
            drawn[cell(end * math.log1p(result["floor"]))] = "╎"
    drawn[middle] = "│"
    for index in range(cell(math.log(result["low"])), cell(math.log(result["high"])) + 1):
        drawn[index] = "┼" if index == middle else "─"
    drawn[cell(math.log(result["ratio"]))] = "●"
    return "".join(drawn)


def paint_bar(drawn: str, paint: Paint, style: str) -> str:
    """Interval and estimate in the verdict's color, what lies behind them dim."""
    first = next(index for index, mark in enumerate(drawn) if mark in "●─┼")
    last = max(index for index, mark in enumerate(drawn) if mark in "●─┼") + 1
    before, interval, after = drawn[:first], drawn[first:last], drawn[last:]
    return "".join(
        paint(part, kind) if part else "" for part, kind in ((before, "dim"), (interval, style), (after, "dim"))
    )


# -- absolute numbers --------------------------------------------------------------------------------------------------
def rates(series: Series, paint: Paint) -> str:
    """Absolute medians, each metric in the unit that people use."""
    found = series.medians()
    if not found or series.is_operations:
        return ""
    label = max(22, *(len(rate_title(metric)) for metric in found))
    lines = []
    for part in in_columns(series.arms, (WIDTH - label) // (NAME + 1)):
        lines.append(paint(f"{'median over blocks':<{label}}{arm_head(part)}", "dim"))
        for metric, values in found.items():
            cells = "".join(f" {shown(metric, values.get(name)):>{NAME}}" for name in part)
            lines.append(f"{rate_title(metric):<{label}}{cells}")
        lines += achieved(series, part, label)
    return "\n".join(lines)


def rate_title(metric: str) -> str:
    """`decode at 16k, tok/s`"""
    return f"{metric_words(metric)}, {metric_of(metric).shown}"


def achieved(series: Series, arms: Sequence[str], label: int) -> list[str]:
    """Mean requests in flight, where more than one was asked for at some point."""
    values = {point: [series.achieved(point, arm) for arm in arms] for point in series.points}
    if series.document.get("scenario") != "concurrency":
        return []
    return [
        f"{f'in flight at {point}':<{label}}" + "".join(f" {'n/a' if v is None else figure(v):>{NAME}}" for v in found)
        for point, found in values.items()
    ]


def latencies(series: Series, paint: Paint) -> str:
    """Quantiles of the latency words inside the slots, each with the requests it needs."""
    if not series.slots or series.is_operations or len(series.points) > MAX_LATENCY_POINTS:
        return ""
    lines = [
        latency_row(series, word, point, arm)
        for point in series.points
        for word in series.latency_words
        for arm in series.arms
        if series.quantiles(word, point, arm)
    ]
    if not lines:
        return ""
    heads = "".join(f" {f'p{100 * quantile:g}':>{QUANTILE_WIDTHS[quantile]}}" for quantile in QUANTILES)
    return "\n".join([paint(f"{'ms':<16} {'arm':<{NAME}}{heads} {'maximum':>9}", "dim"), *lines])


def latency_row(series: Series, word: str, point: str, arm: str) -> str:
    """One arm's quantiles of one word."""
    found = series.quantiles(word, point, arm)
    title = f"{word_title(series, word)}{f' at {point}' if point else ''}"
    cells = "".join(
        f" {one.refusal if one.value is None else figure(1e3 * one.value):>{QUANTILE_WIDTHS[one.quantile]}}"
        for one in found
    )
    return f"{title:<16} {clip(arm, NAME):<{NAME}}{cells} {figure(1e3 * max(one.maximum for one in found)):>9}"


def word_title(series: Series, word: str) -> str:
    """ITL only where every chunk holds one token."""
    if word == "late":
        return "sent late"
    requests = [request for some in series.slots.values() for request in some]
    return "chunk gap" if word == "itl" and not is_token_by_token(requests) else word.upper()


def operations(series: Series, paint: Paint) -> str:
    """Every case: microseconds of each arm, and the baseline against the machine's ceilings and another library."""
    lines = lines_of(series)
    if not lines:
        return ""
    part, peer, found = series.arms[:2], series.meter.get("peer"), list[str]()
    if ceilings := series.meter.get("ceilings"):
        found.append(f"ceilings: {ceiling_words(ceilings)}; rates: {clip(series.arms[0], 20)}")
    if peer:
        found.append(f"last column: times as fast as {peer}'s own; *: calls timed one by one")
    heads = "".join(f" {clip(arm, 4) + ', µs':>8}" for arm in part)
    head = f"×{peer.split()[0]}" if peer else ""
    about = f"{'operation':<11} {'type':<7} {'shape':<14} {'rows':>4}"
    found.append(paint(f"{about}{heads} {'rate':>9} {'share':>5}{head:>7}".rstrip(), "dim"))
    return "\n".join([*found, *(operation_row(line, part) for line in lines)])


def operation_row(line: Line, arms: Sequence[str]) -> str:
    """One case."""
    about = f"{clip(line.op, 39):<39}"
    if line.is_told:
        op = f"{line.op}{'*' if line.is_called else ''}"
        about = f"{op:<11} {clip(line.kind, 7):<7} {clip(line.shape, 14):<14} {line.rows:>4}"
    cells = "".join(f" {'n/a' if arm not in line.costs else figure(1e6 * line.costs[arm]):>8}" for arm in arms)
    return f"{about}{cells} {line.rate:>9} {line.share:>5} {line.times_peer:>6}".rstrip()


# -- the plan ----------------------------------------------------------------------------------------------------------
def render_plan(plan: Document) -> str:
    """What `--plan` prints: the schedule, the minutes, and what such a run could find."""
    names = [arm["name"] for arm in plan["arms"]]
    width = max(len(name) for name in names)
    lines = [
        f"{plan['scenario']}: {plan['n_prompt']} tokens in, {plan['n_out']} out"
        + (f", at {', '.join(plan['points'])}" if plan.get("points") else "")
        + f" · {plan['isolation']} · seed {plan['seed']}",
        "arms: " + ", ".join(f"{arm['name']} ({arm['role']})" for arm in plan["arms"]),
        f"{len(plan['schedule'])} blocks, {len(plan['schedule']) * len(names)} slots"
        + (f", in {plan['starts']} starts:" if plan.get("starts", 1) > 1 else ":"),
        *(
            f"  {number:>3}  " + "  ".join(f"{n:<{width}}" for n in row).rstrip()
            for number, row in enumerate(plan["schedule"])
        ),
        f"time: {plan['time']}",
        "smallest change found with 80 % power, by the spread of paired differences:",
        *(f"  sd {percent(row['sd'])}{spread_source(row)}: {percent(row['mde'])}" for row in plan["mde"]),
        *(f"note: {note}" for note in plan.get("notes", ())),
        "nothing was run",
    ]
    return "\n".join(lines)


def spread_source(row: Document) -> str:
    """Where a spread comes from, when that is this machine."""
    return f" (past null arms here: {row['runs_here']})" if "runs_here" in row else ""


# -- layout ------------------------------------------------------------------------------------------------------------
def in_columns(names: Sequence[str], per_line: int) -> list[Sequence[str]]:
    """Names in groups that fit side by side."""
    size = max(1, per_line)
    return [names[start : start + size] for start in range(0, len(names), size)]


def arm_head(names: Sequence[str]) -> str:
    """Names over their columns."""
    return "".join(f" {clip(name, NAME):>{NAME}}" for name in names)


def clip(name: str, width: int) -> str:
    """A name in at most `width` characters."""
    return name if len(name) <= width else name[: width - 1] + "…"


def wrap(text: str, width: int | None = WIDTH, indent: str = "") -> str:
    """Text broken at `width`, if there is one."""
    if width is None:
        return text
    import textwrap

    # a number and its percent sign stay on one line
    kept = text.replace(" %", "\0%")
    lines = textwrap.fill(kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")
