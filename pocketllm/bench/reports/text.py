"""From a run document to text in 80 columns; reads records, measures nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.arm import Role

WIDTH = 80
NAME = 12
BAR = 17

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
DOES = {"prefill": ("prefills", "prefill"), "decode": ("decodes", "decode")}


def plain(text: str, style: str) -> str:
    """No color."""
    return text


def colored(text: str, style: str) -> str:
    """ANSI color."""
    return f"\033[{STYLES[style]}m{text}\033[0m"


def render(document: Mapping[str, Any], paint: Paint = plain) -> str:
    """The whole report of a bench record."""
    parts = [header(document), *(metric_table(document, metric, paint) for metric in judged_metrics(document))]
    parts += [rates(document, paint)]
    parts += ["\n".join(wrap(line) for line in sentences(document))]
    parts += ["\n".join(wrap(line, "  ") for line in notes(document))]
    return "\n\n".join(part for part in parts if part)


def header(document: Mapping[str, Any]) -> str:
    """What was run."""
    work, arms = document["workload"], document["arms"]
    first = (
        f"{document['scenario']}: {work['n_prompt']} tokens in, {work['n_out']} out, one request at a time · "
        f"{document.get('model', {}).get('name', 'unknown model')}"
    )
    second = (
        f"{document['isolation']} · {document.get('valid_blocks', 0)} of {len(document['schedule'])} blocks × "
        f"{len(arms)} arms, measured requests a slot: {work['requests_per_slot']} · seed {document['seed']}"
    )
    return f"{first}\n{second}"


def judged_metrics(document: Mapping[str, Any]) -> list[str]:
    """Metrics with contrasts, primary ones first."""
    found = dict.fromkeys(r["metric"] for r in sorted(document["results"], key=lambda r: not r["primary"]))
    return list(found)


def metric_table(document: Mapping[str, Any], metric: str, paint: Paint) -> str:
    """Ratio table of one metric: the null arm on top, a bar for each interval."""
    results = [result for result in document["results"] if result["metric"] == metric]
    results.sort(key=lambda result: result["role"] != Role.NULL.value)
    hidden = [hides_ratio(document, result) for result in results]
    shown = [result for result, hide in zip(results, hidden, strict=True) if not hide]
    reach = axis_reach(shown)
    baseline = document["arms"][0]["name"]
    title = f"{metric.replace('_', ' ')}, time per token against {baseline}"
    if not results[0]["primary"]:
        title += " (also measured, not judged)"
    left, right = f"{math.exp(-reach):.3g}", f"{math.exp(reach):.3g}"
    ruler = left + "1".center(BAR - len(left) - len(right)) + right
    columns = f"{'arm':<{NAME}} {'time':>7} {'95 % interval':^13} {'speed':>7} {ruler} verdict"
    lines = [paint(title, "bold"), paint(columns, "dim")]
    for result, hide in zip(results, hidden, strict=True):
        lines.append(table_row(document, result, reach, hide, paint))
    return "\n".join(lines)


def hides_ratio(document: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """An invalid run shows no ratio but the null arm's, which says why."""
    return not document["valid"] and result["role"] != Role.NULL.value


def table_row(document: Mapping[str, Any], result: Mapping[str, Any], reach: float, hide: bool, paint: Paint) -> str:
    """One arm: ratio, interval, speed, bar, word."""
    name = clip(result["arm"], NAME)
    if hide:
        return f"{name:<{NAME}} {'–':>7} {'–':^13} {'–':>7} {'':{BAR}} {word_of(result, paint)}".rstrip()
    interval = f"{short(result['low'])}–{short(result['high'])}"
    numbers = f"{short(result['ratio']) + '×':>7} {interval:^13} {short(1 / result['ratio']) + '×':>7}"
    return f"{name:<{NAME}} {numbers} {bar(result, reach)} {word_of(result, paint)}".rstrip()


def word_of(result: Mapping[str, Any], paint: Paint) -> str:
    """The verdict, or what stands in its place."""
    if result["verdict"] is not None:
        return paint(result["verdict"], WORD_STYLES[Word(result["verdict"])])
    if result["role"] == Role.NULL.value and result["floor"] is not None:
        return f"floor {percent(result['floor'])}"
    return ""


def axis_reach(results: Sequence[Mapping[str, Any]]) -> float:
    """Half the axis, as a log ratio: it holds every interval and twice the margin."""
    ends = [abs(math.log(result[end])) for result in results for end in ("low", "high")]
    margins = [2 * math.log1p(result["margin"]) for result in results]
    return max([*ends, *margins, 0.01])


def bar(result: Mapping[str, Any], reach: float) -> str:
    """The interval on an axis of BAR cells, with the estimate as a dot and no difference as a line."""

    def cell(ratio: float) -> int:
        return round((math.log(ratio) / reach + 1) / 2 * (BAR - 1))

    cells = [" "] * BAR
    cells[BAR // 2] = "│"
    for index in range(cell(result["low"]), cell(result["high"]) + 1):
        cells[index] = "┼" if index == BAR // 2 else "─"
    cells[cell(result["ratio"])] = "●"
    return "".join(cells)


def rates(document: Mapping[str, Any], paint: Paint) -> str:
    """Absolute medians, prefill and decode apart."""
    medians = document["medians"]
    if not medians:
        return ""
    names = [arm["name"] for arm in document["arms"]]
    lines = []
    per_line = max(1, (WIDTH - 22) // (NAME + 1))
    for start in range(0, len(names), per_line):
        part = names[start : start + per_line]
        head = "".join(f" {clip(name, NAME):>{NAME}}" for name in part)
        lines.append(paint(f"{'median over blocks':<22}{head}", "dim"))
        for metric, values in medians.items():
            unit = "ms" if metric == "first_decode" else "tok/s"
            cells = "".join(f" {rate(metric, values.get(name)):>{NAME}}" for name in part)
            lines.append(f"{metric.replace('_', ' ') + ', ' + unit:<22}{cells}")
    return "\n".join(lines)


def rate(metric: str, seconds: float | None) -> str:
    """Seconds per token as people read them."""
    if seconds is None:
        return "n/a"
    return f"{seconds * 1e3:.2f}" if metric == "first_decode" else f"{1 / seconds:.1f}"


def sentences(document: Mapping[str, Any]) -> list[str]:
    """One sentence for each judged contrast, or why there is none."""
    if document.get("ended_by"):
        return [f"Interrupted: {document.get('valid_blocks', 0)} whole blocks are kept, and no verdict is given."]
    if not document["valid"]:
        broken = [f"{c['code']} {c['detail']}" for c in document["checks"] if c["severity"] == "run"]
        return [f"INVALID, nothing is concluded: {reason}." for reason in broken]
    judged = [result for result in document["results"] if result["verdict"] is not None]
    if not judged and any(r["role"] == Role.CANDIDATE.value for r in document["results"]):
        return ["No null arm ran (--no-null): intervals only, no verdict."]
    if not judged:
        return ["Only the baseline and its null arm ran: this is a check of the instrument."]
    return [sentence(document, result) for result in judged]


def sentence(document: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """A verdict in words, with the null arm beside it."""
    arm, base = result["arm"], document["arms"][0]["name"]
    does, do = DOES.get(result["metric"], (f"does {result['metric']}", result["metric"]))
    numbers = (
        f"{short(result['ratio'])}× time, 95 % CI {short(result['low'])}–{short(result['high'])} "
        f"({short(1 / result['ratio'])}× speed, {short(1 / result['high'])}–{short(1 / result['low'])}), "
        f"{result['n']} blocks; {null_words(document, result)}"
    )
    margin = percent(result["margin"])
    match Word(result["verdict"]):
        case Word.FASTER:
            return f"{arm} {does} faster than {base}: {numbers}."
        case Word.SLOWER:
            return f"{arm} {does} slower than {base}: {numbers}."
        case Word.SAME:
            return f"{arm} {does} as fast as {base} within ±{margin}: {numbers}."
        case Word.SMALL:
            return f"{arm} and {base} differ in {do} by less than this rig can defend: {numbers}."
        case Word.NOT_DISTINGUISHABLE:
            return f"{arm} and {base} could not be told apart in {do}: {numbers}. {power_words(result)}"
        case Word.INVALID:
            return f"INVALID, nothing is concluded: {result['reason']}."


def null_words(document: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What A against A showed, and what the null arm was."""
    null = next(r for r in document["results"] if r["role"] == Role.NULL.value and r["metric"] == result["metric"])
    copy = "the same process" if document["isolation"] == "toggle" else "the same endpoint"
    return f"null {percent(null['ratio'] - 1, sign='+')} ({copy} relabelled; floor {percent(result['floor'])})"


def power_words(result: Mapping[str, Any]) -> str:
    """What this run could have seen, and what it would take to see the margin."""
    seen = f"It would have found a change of {percent(result['mde'])} (80 % power)"
    if result["mde"] <= result["margin"]:
        return f"{seen}."
    needed = result["blocks_to_resolve"]
    cure = f"about {needed} blocks would, or a quieter machine" if needed else "only a quieter machine would"
    return f"{seen}: the machine was too noisy in this run to judge a change of {percent(result['margin'])}; {cure}."


def notes(document: Mapping[str, Any]) -> list[str]:
    """Remarks: what the isolation allows to be claimed, notes and block losses, outliers."""
    lines = [f"note: {document['isolation']}: {document['claim']}"]
    lines += [f"note: {text}" for text in document.get("notes", [])]
    lines += [f"note: {check['code']} {check['detail']}" for check in document["checks"] if check["severity"] != "run"]
    for result in document["results"]:
        if result["primary"] and result["outlying_blocks"]:
            flips = "the verdict would change" if result["flips_without_outliers"] else "the verdict would not change"
            count = f"{result['outlying_blocks']} outlying block(s)"
            ending = f"; {flips} without" if result["verdict"] is not None else ""
            lines.append(f"note: {result['metric']}, {result['arm']}: {count}, kept{ending}")
    return lines


def render_plan(plan: Mapping[str, Any]) -> str:
    """What `--plan` prints: the schedule, the minutes, and what such a run could find."""
    names = [arm["name"] for arm in plan["arms"]]
    width = max(len(name) for name in names)
    lines = [
        f"{plan['scenario']}: {plan['n_prompt']} tokens in, {plan['n_out']} out · {plan['isolation']} · "
        f"seed {plan['seed']}",
        "arms: " + ", ".join(f"{arm['name']} ({arm['role']})" for arm in plan["arms"]),
        f"{len(plan['schedule'])} blocks, {len(plan['schedule']) * len(names)} slots:",
        *(
            f"  {number:>3}  " + "  ".join(f"{n:<{width}}" for n in row).rstrip()
            for number, row in enumerate(plan["schedule"])
        ),
        f"time: {plan['time']}",
        "smallest change found with 80 % power, by the spread of paired differences:",
        *(f"  sd {percent(row['sd'])}: {percent(row['mde'])}" for row in plan["mde"]),
        "nothing was run",
    ]
    return "\n".join(lines)


def percent(value: float, sign: str = "") -> str:
    """A share as `0.7 %`; with sign="+" a positive one says so.

    >>> percent(0.0072), percent(0.01), percent(0.01, sign="+")
    ('0.7 %', '1.0 %', '+1.0 %')
    """
    return f"{value:{sign}.1%}".replace("%", " %")


def short(ratio: float) -> str:
    """A ratio in about four digits.

    >>> short(0.9684), short(12.345), short(123.4)
    ('0.968', '12.35', '123')
    """
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def clip(name: str, width: int) -> str:
    """A name in at most `width` characters."""
    return name if len(name) <= width else name[: width - 1] + "…"


def wrap(text: str, indent: str = "") -> str:
    """Text broken at WIDTH."""
    import textwrap

    # a number and its percent sign stay on one line
    kept = text.replace(" %", "\0%")
    lines = textwrap.fill(kept, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")
