"""`pocketllm records sql | diff | trend | verify`: questions to many records."""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli.output import reader_may_leave, say, write_json
from pocketllm.cli.records.flags import AsJson, Id, RecordDir

if TYPE_CHECKING:
    from pocketllm.evidence.query.difference import Difference
    from pocketllm.evidence.query.trend import Series
    from pocketllm.evidence.query.verify import Finding


def sql(
    query: Annotated[str, typer.Argument(help="One DuckDB query over runs, requests, slots, results.")],
    record_dir: RecordDir = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask records in SQL: views `runs`, `requests`, `slots` and `results`, columns united over versions by name.

    `describe results` lists a view's columns. The query sees records and no other file. Needs DuckDB (the extra `sql`).
    """
    from pocketllm.errors import OptionError
    from pocketllm.evidence.query.frames import Frames
    from pocketllm.evidence.query.sql import ask
    from pocketllm.evidence.schema import plain

    if as_csv and as_json:
        raise OptionError("give --csv or --json, not both: there is one standard output")
    answer = ask(Frames.load(record_dir, on_problem=lambda error: say(f"warning: {error}")), query)
    rows = [[simple(value) for value in row] for row in answer.rows]
    if as_json:
        write_json(plain(simple(answer.as_dicts())))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([answer.columns, *rows])
    else:
        for line in aligned(answer.columns, rows):
            typer.echo(line)


def simple(value: Any) -> Any:
    """A value as JSON and CSV can hold it; times and the like become text, inside lists and structs too."""
    if isinstance(value, list | tuple):
        return [simple(item) for item in value]
    if isinstance(value, dict):
        return {str(key): simple(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def aligned(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Columns under their names, as wide as they need; floats in six digits."""
    from pocketllm.evidence.pages.layout import printable

    cells = [[shown(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in (names, *cells):
        yield printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(value: Any) -> str:
    """One cell."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def diff(first: Id, second: Id, record_dir: RecordDir = None, as_json: AsJson = False) -> None:
    """Show how two records differ: how they were made (code, machine, options, workload), and what came out."""
    from pocketllm.evidence.query.difference import difference
    from pocketllm.evidence.schema import plain
    from pocketllm.evidence.store import read_record, search_dirs

    folders = search_dirs(record_dir)
    found = difference(read_record(first, folders), read_record(second, folders))
    if as_json:
        write_json(plain(found.as_dict()))
        return
    for warning in found.warnings:
        say(f"note: {warning}")
    for line in difference_lines(found):
        typer.echo(line)


def difference_lines(found: "Difference") -> Iterator[str]:
    """Facts that differ, then outcomes side by side."""
    from pocketllm.evidence.pages.layout import fold, section, table

    made: list[str] = []
    for change in found.made:
        made += [f"  {change.name}"]
        for mark, value in (("-", change.first), ("+", change.second)):
            made += fold("(not told)" if value is None else str(value), f"    {mark} ", "      ")
    lines = section("How they were made", made or ["  no difference"])
    rows = [(pair.name, pair.first or "", pair.second or "", "" if pair.same else "differs") for pair in found.outcome]
    lines += section("What came out", table(("", "first", "second", ""), rows))
    yield from lines[1:]


def trend(
    scenario: Annotated[str | None, typer.Option("--scenario", help="Only this scenario.", show_default=False)] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="Only this metric.", show_default=False)] = None,
    arm: Annotated[str | None, typer.Option("--arm", help="Only this arm.", show_default=False)] = None,
    record_dir: RecordDir = None,
    as_json: AsJson = False,
) -> None:
    """Show how time ratios moved from run to run: one series for each arm, metric, workload and machine.

    Each ratio is to the baseline of its own run, so days and machine states cancel; absolute times are never compared.
    """
    from pocketllm.evidence.query.trend import trends
    from pocketllm.evidence.store import list_records, search_dirs

    records = list_records(search_dirs(record_dir), "bench", on_problem=lambda error: say(f"warning: {error}"))
    series = trends(records, scenario, metric, arm)
    if as_json:
        write_json([one.as_dict() for one in series])
        return
    if not series:
        say("no valid bench records of that kind here; `pocketllm bench` writes them")
    for place, one in enumerate(series):
        for line in series_lines(one):
            typer.echo(line)
        if place + 1 < len(series):
            typer.echo("")


def series_lines(series: "Series") -> Iterator[str]:
    """A head and one line a run, with a bar around a ratio of 1."""
    from pocketllm.evidence.pages.layout import printable, table

    reach = max(max(point.high - 1, 1 - point.low) for point in series.points)
    yield printable(f"{series.scenario}, {series.metric}: {series.arm} against {series.baseline} ({series.isolation})")
    yield printable(f"  {series.model}; {series.machine}")
    rows = [
        (
            point.run_id[:10],
            point.started_utc[:16].replace("T", " "),
            (point.commit or "")[:8],
            f"{point.ratio:.3f}",
            f"{point.low:.3f}–{point.high:.3f}",
            bar(point.low, point.ratio, point.high, reach),
            point.verdict or "",
        )
        for point in series.points
    ]
    for line in table(("id", "started (UTC)", "commit", "ratio", "95 % interval", "", "verdict"), rows):
        yield printable(line)


def bar(low: float, ratio: float, high: float, reach: float) -> str:
    """An interval on 11 cells around 1.

    >>> bar(0.9, 1.0, 1.1, 0.1)
    '─────●─────'
    """

    def cell(value: float) -> int:
        return round(5 + 5 * (value - 1) / (reach or 1.0))

    cells = ["│" if place == 5 else " " for place in range(11)]
    cells[cell(low) : cell(high) + 1] = ["─"] * (cell(high) - cell(low) + 1)
    cells[cell(ratio)] = "●"
    return "".join(cells)


def verify(
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Records or files; all that are found, without any.", show_default=False),
    ] = None,
    record_dir: RecordDir = None,
    as_json: AsJson = False,
) -> None:
    """Check that record files are whole: digests, columns and types, document keys, redaction, name and folder.

    A benchmark judged by this version's rules is computed again from its rows; one judged by others is noted. Exit 1
    when a file is not what it claims to be.
    """
    from pocketllm.bench.analysis.again import differences
    from pocketllm.bench.analysis.rules import rules_sha256
    from pocketllm.evidence.query.verify import verify as check

    paths = [path_of(run_id, record_dir) for run_id in run_ids] if run_ids else all_paths(record_dir)
    findings = [check(path, rules_sha256(), differences) for path in paths]
    bad = [finding for finding in findings if finding.faults]
    with reader_may_leave():
        if as_json:
            write_json([as_dict(finding) for finding in findings])
        else:
            for finding in findings:
                for line in finding_lines(finding):
                    typer.echo(line)
    say(f"{len(findings) - len(bad)} of {len(findings)} records are whole" if findings else "no records here")
    if bad:
        raise typer.Exit(1)


def path_of(run_id: str, record_dir: Path | None) -> Path:
    """The file of a record: one given by its name is taken as it is, also when it is broken."""
    from pocketllm.evidence.store import read_record, search_dirs

    given = Path(run_id)
    return given if given.suffix in (".parquet", ".journal") else read_record(run_id, search_dirs(record_dir)).path


def all_paths(record_dir: Path | None) -> list[Path]:
    """Every record file that is found, a kept copy and the local one both."""
    from pocketllm.evidence.store import files_in, search_dirs

    return list(files_in(search_dirs(record_dir)))


def as_dict(finding: "Finding") -> dict[str, Any]:
    """A finding as JSON has it."""
    told = {"run_id": finding.run_id, "path": str(finding.path), "whole": not finding.faults}
    return {**told, "faults": list(finding.faults), "notes": list(finding.notes)}


def finding_lines(finding: "Finding") -> Iterator[str]:
    """One line a file, then its faults and notes."""
    from pocketllm.evidence.pages.layout import printable, wrap

    yield printable(f"{'BROKEN' if finding.faults else 'whole '}  {finding.path.name}")
    for text in finding.faults:
        yield from map(printable, wrap(text))
    for text in finding.notes:
        yield from map(printable, wrap(f"note: {text}"))
