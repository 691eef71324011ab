"""`pocketllm bench report`: a record as text, as a page, as a picture, and in the words of other tools."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli.bench.terminal import paint, show
from pocketllm.cli.output import check_place, command, say, write_json

if TYPE_CHECKING:
    from pocketllm.bench.reports.series import Series
    from pocketllm.evidence.store import Record

EPILOG = """Examples:

pocketllm bench report 01K9ZQ

pocketllm bench report 01K9ZQ --html report.html

pocketllm bench report records/bench/year=2026/01K9ZQ.parquet --as vllm --as llama-bench
"""


def register(bench: typer.Typer) -> None:
    """Add this command to `pocketllm bench`."""
    bench.command("report", epilog=EPILOG)(command(report))


def report(
    record: Annotated[
        str, typer.Argument(metavar="RECORD", help="The beginning of a record's id, or its file.", show_default=False)
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write one page that needs no other file.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture (needs the extra `plots`).")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="The same as SVG.")] = None,
    views: Annotated[
        list[str] | None,
        typer.Option("--as", help="Also what vllm, sglang, guidellm, aiperf or llama-bench would say; repeatable."),
    ] = None,
    record_dir: Annotated[
        Path | None,
        typer.Option("--record-dir", help="Look here only.", show_default="./records and the user's data folder"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show a bench record: ratios, rates, latencies, what it can claim; measures nothing and never edits a record."""
    from pocketllm.bench.reports.series import Series
    from pocketllm.bench.reports.views import find_view

    chosen = list(dict.fromkeys(views or []))
    for name in chosen:
        find_view(name)
    for path, flag in ((html, "--html"), (png, "--png"), (svg, "--svg")):
        check_place(path, flag)
    found = bench_record(record, record_dir)
    series = Series(found.document, found.row_dicts)
    write_files(series, html, png, svg, chosen)
    if as_json:
        write_json(as_document(found, series, chosen))
    else:
        print_text(series, chosen)


def bench_record(name: str, record_dir: Path | None) -> "Record":
    """The record of that id or file; OptionError when it is no benchmark, RecordError when it lacks what is shown."""
    from pocketllm.bench.reports.readable import check_readable
    from pocketllm.errors import OptionError
    from pocketllm.evidence.store import read_record, search_dirs

    found = read_record(name, search_dirs(record_dir))
    if found.kind != "bench":
        raise OptionError(f"{found.run_id} is of kind {found.kind}, not bench; `pocketllm records show` prints it")
    check_readable(found.document)
    return found


def write_files(series: "Series", html: Path | None, png: Path | None, svg: Path | None, views: list[str]) -> None:
    """The page and the pictures that were asked for; each is whole or not there."""
    if html is not None:
        from pocketllm.bench.reports.html.page import render_page

        write_whole(html, render_page(series.document, series.rows, views).encode())
    pictures = {path: kind for path, kind in ((png, "png"), (svg, "svg")) if path is not None}
    if pictures:
        from pocketllm.bench.reports.plots import render_plot

        for path, kind in pictures.items():
            write_whole(path, render_plot(series, kind))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by way of another name, so that nobody reads half of it; OptionError when it cannot be written."""
    from pocketllm.errors import OptionError

    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error
    say(f"written: {path}")


def print_text(series: "Series", views: list[str]) -> None:
    """The report, then the views."""
    from pocketllm.bench.reports.comparison import render_view
    from pocketllm.bench.reports.text import render
    from pocketllm.evidence.pages.layout import columns

    show(render(series.document, paint(), series.rows, columns()))
    for name in views:
        show("\n" + render_view(series, name, paint(), columns()))


def as_document(record: "Record", series: "Series", views: list[str]) -> dict[str, Any]:
    """The run document with what a report computes from its rows."""
    from pocketllm.bench.reports.views import view
    from pocketllm.bench.reports.words import sentences

    return {
        "record": record.run_id,
        "complete": record.complete,
        "sentences": sentences(series.document),
        "medians": series.medians(),
        "operations": series.operations() if series.is_operations else None,
        "views": {name: view(series, name) for name in views},
        "document": series.document,
    }
