"""What a record's page says between its head and its machine: one function a kind."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pocketllm.evidence.pages.layout import INDENT, facts, join_pairs, number, section, table, wrap
from pocketllm.evidence.store import Record


def bench_sections(record: Record) -> Iterator[str]:
    """Arms, results with intervals, speeds, checks."""
    document = record.document
    margin = document.get("margin")
    margins = margin.items() if isinstance(margin, Mapping) else [("all", margin)] if margin is not None else []
    yield from section(
        "What was run",
        facts(
            ("scenario", document.get("scenario")),
            ("workload", join_pairs(document.get("workload"), skip=("about", "prompts"))),
            ("isolation", document.get("isolation")),
            ("claim", document.get("claim")),
            ("schedule", schedule_line(document)),
            ("margin", ", ".join(f"{name} {value:.1%}" for name, value in margins)),
        ),
    )
    rows = [
        (a.get("name"), a.get("role"), a.get("target"), a.get("served_by"), join_pairs(a.get("options")))
        for a in document.get("arms") or []
    ]
    yield from section("Arms", table(("arm", "role", "target", "served by", "options"), rows))
    yield from section("Results (time ratio to the baseline, 95 % interval)", result_lines(document))
    yield from section("Medians", median_lines(document))
    yield from section("Checks", check_lines(document))


def result_lines(document: Mapping[str, Any]) -> list[str]:
    """One line a contrast; no ratio stands in the headline of an INVALID run, so the word comes first."""
    rows = [
        (
            entry.get("metric"),
            entry.get("arm"),
            number(entry.get("ratio"), ".3f"),
            f"{number(entry.get('low'), '.3f')}-{number(entry.get('high'), '.3f')}",
            entry.get("n"),
            number(entry.get("floor"), ".1%"),
            number(entry.get("mde"), ".1%"),
            entry.get("verdict") or ("null arm" if entry.get("role") == "null" else "not judged"),
        )
        for entry in document.get("results") or []
    ]
    if not document.get("complete"):
        lines = [f"{INDENT}INCOMPLETE: nothing below is a finding"]
    elif not document.get("valid", True):
        lines = [f"{INDENT}INVALID: see the checks; nothing below is a finding"]
    else:
        lines = []
    return lines + table(("metric", "arm", "ratio", "interval", "n", "floor", "mde", "verdict"), rows)


def median_lines(document: Mapping[str, Any]) -> list[str]:
    """Medians of every arm: a cost per token as a rate too, any other in milliseconds."""
    units = {result.get("metric"): result.get("unit") for result in document.get("results") or []}
    rows = [
        (
            metric,
            arm,
            f"{1 / value:.1f} tokens/s" if units.get(metric, "s/token") == "s/token" else "",
            f"{value * 1000:.3f} ms{(units.get(metric) or 's/token')[1:]}",
        )
        for metric, values in (document.get("medians") or {}).items()
        for arm, value in values.items()
        if value
    ]
    return table(("metric", "arm", "speed", "time"), rows)


def check_lines(document: Mapping[str, Any]) -> list[str]:
    """One wrapped line a validity code."""
    lines: list[str] = []
    for check in document.get("checks") or []:
        lines += wrap(f"{check.get('code')} ({check.get('severity')}): {check.get('detail') or check.get('value')}")
    return lines


def schedule_line(document: Mapping[str, Any]) -> str:
    """How many blocks and slots were planned, and with which seed."""
    schedule = document.get("schedule") or []
    slots = sum(len(block) if isinstance(block, list) else 1 for block in schedule)
    return f"{len(schedule)} blocks, {slots} slots, seed {document.get('seed')}"


def golden_sections(record: Record) -> Iterator[str]:
    """One line a check of a case."""
    rows = [
        (
            row["case"],
            row["entry_point"],
            row["check"],
            "yes" if row["stream"] else "no" if row["stream"] is False else "",
            row["concurrency"],
            row["outcome"],
        )
        for row in record.row_dicts
    ]
    yield from section("Checks", table(("case", "entry point", "check", "stream", "width", "outcome"), rows))
    failed = [row for row in record.row_dicts if row["detail"] and row["outcome"] not in ("IDENTICAL", "TIE")]
    lines = [line for row in failed for line in wrap(f"{row['case']} ({row['entry_point']}): {row['detail']}")]
    yield from section("Details", lines)


def parity_sections(record: Record) -> Iterator[str]:
    """One line a comparison."""
    rows = [
        (
            row["subject"],
            " ".join(filter(None, (row["oracle"], row["oracle_version"]))),
            row["n"],
            *(number(row[name], ".2g") for name in ("max_error", "kl", "top1", "tolerance")),
            "yes" if row["passed"] else "NO",
        )
        for row in record.row_dicts
    ]
    names = ("subject", "oracle", "n", "max error", "kl", "top-1", "tolerance", "inside")
    yield from section("Comparisons", table(names, rows))
    lines = [line for row in record.row_dicts if row["detail"] for line in wrap(f"{row['subject']}: {row['detail']}")]
    yield from section("Details", lines)


def inspect_sections(record: Record) -> Iterator[str]:
    """Errors found, and the short facts of the report."""
    report = record.document.get("report") or {}
    yield from section("Errors", [line for error in report.get("errors") or [] for line in wrap(str(error))])
    short = [(name, value) for name, value in report.items() if isinstance(value, (str, int, float))]
    yield from section("Report", facts(*short))


def ladder_sections(record: Record) -> Iterator[str]:
    """One line a model and device class."""
    rows = [(row["model"], row["device_class"], row["rung"], row["freshness"]) for row in record.row_dicts]
    yield from section("Ladder", table(("model", "device", "rung", "freshness"), rows))


def calibration_sections(record: Record) -> Iterator[str]:
    """The summary of each metric, and the runs that were called different or INVALID."""
    summary = record.document.get("summary") or []
    names = ("metric", "runs", "judged", "called", "excludes 1", "invalid", "floor", "mde")
    rows = [
        (
            entry.get("metric"),
            *(entry.get(name) for name in ("runs", "judged", "called", "excluding", "invalid")),
            number(entry.get("floor"), ".2%"),
            number(entry.get("mde"), ".2%"),
        )
        for entry in summary
    ]
    yield from section("Summary", table(names, rows))
    odd = [row for row in record.row_dicts if row["verdict"] in ("FASTER", "SLOWER", "INVALID")]
    lines = [f"run {row['run']}, seed {row['seed']}, {row['metric']}: {row['verdict']}, {row['reason']}" for row in odd]
    yield from section("Runs that were called different, or fell", [line for text in lines for line in wrap(text)])


def imported_sections(record: Record) -> Iterator[str]:
    """One line a figure, as the other tool told it."""
    names = ("test", "metric", "statistic", "value", "unit", "n")
    rows = [
        (row["test"], row["metric"], row["statistic"], number(row["value"], ".6g"), row["unit"], row["n"])
        for row in record.row_dicts
    ]
    yield from section("Figures of another tool (never a verdict)", table(names, rows))


def soak_sections(record: Record) -> Iterator[str]:
    """What clients did to a server, what was wrong, and its memory over time."""
    outcome = record.document.get("outcome") or {}
    counts = [(name, value) for name, value in outcome.items() if isinstance(value, (str, int, float))]
    yield from section("Outcome", facts(("clients", record.document.get("clients")), *counts))
    yield from section("Faults", [line for fault in outcome.get("faults") or [] for line in wrap(str(fault))])
    rows = record.row_dicts[:: max(len(record.row_dicts) // 12, 1)]
    lines = [(number(row["t_s"], ".0f"), number(row["rss"] / 2**20, ".1f"), row["n_requests"]) for row in rows]
    yield from section("Memory of the server", table(("seconds", "MiB", "requests"), lines))


SECTIONS: Mapping[str, Callable[[Record], Iterator[str]]] = {
    "bench": bench_sections,
    "golden": golden_sections,
    "parity": parity_sections,
    "inspect": inspect_sections,
    "ladder": ladder_sections,
    "calibration": calibration_sections,
    "imported": imported_sections,
    "soak": soak_sections,
}
