"""From a record to text a person reads: lines of 80 columns, the same in a terminal and in a pipe; measures nothing."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pocketllm.evidence.device_class import recorded_device_class
from pocketllm.evidence.store import LOCAL, Record

WIDTH = 80
INDENT = "  "
SHORT_SHA = 12
MIN_PREFIX = 10
"""Letters of an id that are its time."""


# -- the list ----------------------------------------------------------------------------------------------------------
def listing(records: Sequence[Record]) -> list[str]:
    """One line a record, oldest first: id prefix that names it, time, kind, where it lies, what came out."""
    length = prefix_length([record.run_id for record in records])
    rows = [
        (
            record.run_id[:length],
            str(record.document.get("started_utc", ""))[:16].replace("T", " "),
            record.kind,
            "local" if record.path.parent.name == LOCAL else "kept" if "year=" in str(record.path) else "",
            summary(record),
        )
        for record in records
    ]
    lines = table(("id", "started (UTC)", "kind", "where", "what came out"), rows, indent="")
    return [printable(line) for line in lines]


def prefix_length(ids: Sequence[str]) -> int:
    """Shortest prefix length, at least the time's letters, at which all ids differ."""
    longest = max((len(run_id) for run_id in ids), default=MIN_PREFIX)
    lengths = range(MIN_PREFIX, longest)
    return next((length for length in lengths if len({run_id[:length] for run_id in ids}) == len(set(ids))), longest)


def summary(record: Record) -> str:
    """What came out of a run, in a few words."""
    state = "" if record.complete else "incomplete: "
    name = model_of(record.document).get("name")
    return f"{state}{OUTCOMES[record.kind](record)}{f' ({name})' if name else ''}"


def bench_outcome(record: Record) -> str:
    """The verdict of every candidate, or INVALID with the rules that broke."""
    document = record.document
    scenario = str(document.get("scenario", "?"))
    if "valid" not in document:
        return f"{scenario}, no results"
    if not record.complete:
        return f"{scenario}, no verdict"
    if not document["valid"]:
        codes = [str(check.get("code")) for check in document.get("checks", []) if check.get("severity") == "run"]
        return f"{scenario} INVALID {' '.join(dict.fromkeys(codes))}".rstrip()
    results = [r for r in document.get("results", []) if r.get("verdict")]
    words = [f"{r['arm']} {r['verdict']}" + f" in {r['metric']}" * (r["metric"] != scenario) for r in results]
    return f"{scenario}: {', '.join(words) or 'no verdict'}"


def golden_outcome(record: Record) -> str:
    """How many rows had which outcome."""
    counts = Counter(row.get("outcome") or "?" for row in record.row_dicts)
    return ", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "nothing compared"


def parity_outcome(record: Record) -> str:
    """How many comparisons stayed inside their tolerance."""
    passed = sum(row.get("passed") is True for row in record.row_dicts)
    return f"{passed} of {len(record.row_dicts)} inside tolerance"


def inspect_outcome(record: Record) -> str:
    """How many errors an inspection found."""
    errors = (record.document.get("report") or {}).get("errors")
    return "not told" if errors is None else f"{len(errors) or 'no'} error{'s' * (len(errors) != 1)}"


def ladder_outcome(record: Record) -> str:
    """How many models a ladder speaks of."""
    return f"{len(record.row_dicts)} rows"


def calibration_outcome(record: Record) -> str:
    """How many A/A runs there are, and how many of them were called different."""
    rows = [row for row in record.row_dicts if row["verdict"]]
    calls = sum(row["verdict"] in ("FASTER", "SLOWER") for row in rows)
    return f"{record.document.get('scenario', '?')} A/A: {calls} of {len(rows)} verdicts called a difference"


def imported_outcome(record: Record) -> str:
    """Which tool's figures these are."""
    return f"{len(record.row_dicts)} figures of {record.document.get('source', '?')}, no verdict"


OUTCOMES: Mapping[str, Callable[[Record], str]] = {
    "bench": bench_outcome,
    "golden": golden_outcome,
    "parity": parity_outcome,
    "inspect": inspect_outcome,
    "ladder": ladder_outcome,
    "calibration": calibration_outcome,
    "imported": imported_outcome,
}


# -- the page ----------------------------------------------------------------------------------------------------------
def page(record: Record) -> list[str]:
    """Everything a reader asks of one record: what was run, what came out, checks, machine and code."""
    document = record.document
    tool = document.get("tool") or {}
    lines = [
        f"{record.kind} {record.run_id}",
        *facts(
            ("state", "complete" if record.complete else incomplete(document)),
            ("made by", f"{tool.get('name', '?')} {tool.get('version', '')}"),
            ("time", f"{document.get('started_utc')} to {document.get('finished_utc') or '(no end)'}"),
            ("command", " ".join(document.get("argv") or [])),
            ("model", model_line(document)),
            ("device", recorded_device_class(document)),
        ),
        *SECTIONS[record.kind](record),
        *section("Machine", machine_facts(document)),
        *section("Code", code_facts(document)),
        "",
        f"{len(record.row_dicts)} rows in {record.path.name}",
    ]
    return [printable(line) for line in lines]


def incomplete(document: Mapping[str, Any]) -> str:
    """Why a record has no end, as far as it says."""
    ended = document.get("ended_by")
    return f"INCOMPLETE: ended by {ended}" if ended else "INCOMPLETE: killed, still running, or results missing"


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
    """Tokens per second of every arm, from the medians in seconds per token."""
    medians = document.get("medians") or {}
    rows = [
        (metric, arm, f"{1 / value:.1f} tokens/s", f"{value * 1000:.3f} ms/token")
        for metric, values in medians.items()
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


SECTIONS: Mapping[str, Callable[[Record], Iterator[str]]] = {
    "bench": bench_sections,
    "golden": golden_sections,
    "parity": parity_sections,
    "inspect": inspect_sections,
    "ladder": ladder_sections,
    "calibration": calibration_sections,
    "imported": imported_sections,
}


def model_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model facts of a document, empty when it has none."""
    model = document.get("model")
    return model if isinstance(model, Mapping) else {}


def model_line(document: Mapping[str, Any]) -> str:
    """Name, architecture, quant types and the beginning of the digest."""
    model = model_of(document)
    sha256 = str(model.get("sha256") or "")
    parts = [model.get("name"), model.get("architecture"), "+".join(model.get("quant_types") or ())]
    return ", ".join(str(part) for part in (*parts, sha256 and f"sha256 {sha256[:SHORT_SHA]}…") if part)


def machine_facts(document: Mapping[str, Any]) -> list[str]:
    """Hard facts, then volatile ones."""
    machine = document.get("machine") or {}
    both = {**(machine.get("hard") or {}), **(machine.get("volatile") or {})}
    return facts(*((name.replace("_", " "), value) for name, value in both.items()))


def code_facts(document: Mapping[str, Any]) -> list[str]:
    """Commit, difference from it, Python and package versions."""
    code = document.get("code") or {}
    dirty = code.get("dirty")
    difference = str(code.get("diff_sha256") or "")[:SHORT_SHA]
    tree = None if dirty is None else f"uncommitted changes, digest {difference}…" if dirty else "as committed"
    packages = join_pairs(code.get("packages"), separator=" ")
    return facts(("commit", code.get("commit")), ("tree", tree), ("python", code.get("python")), ("packages", packages))


# -- layout ------------------------------------------------------------------------------------------------------------
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
    """A text in lines of 80; names with hyphens stay whole."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def join_pairs(values: Any, separator: str = "=", skip: Sequence[str] = ()) -> str:
    """`a=1, b=2` of a mapping; empty for anything else."""
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{name}{separator}{value}" for name, value in values.items() if name not in skip)


def number(value: Any, form: str) -> str:
    """A number in the given form; empty when absent."""
    return format(value, form) if isinstance(value, (int, float)) else ""


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], indent: str = INDENT) -> list[str]:
    """Aligned columns within 80, columns without any value left out, the widest cut with `…`; nothing without rows."""
    if not rows:
        return []
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    shown = [column for column in range(len(names)) if any(row[column] for row in cells)]
    grid = [[names[column] for column in shown], *([row[column] for column in shown] for row in cells)]
    widths = [max(len(row[place]) for row in grid) for place in range(len(shown))]
    while sum(widths) + 2 * (len(widths) - 1) + len(indent) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    return [
        indent + "  ".join(cut(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid
    ]


def cut(text: str, width: int) -> str:
    """A text in exactly so many columns."""
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def printable(line: str) -> str:
    """A line that cannot steer a terminal, whoever wrote the record."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
