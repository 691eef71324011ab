"""`pocketllm records ls | show | keep`: look at run records, and keep some."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pocketllm.cli.output import say, write_json
from pocketllm.cli.records.flags import AsJson, Id, RecordDir


def ls(
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", help="bench, golden, parity, inspect, ladder, calibration, imported or soak.", show_default=False
        ),
    ] = None,
    record_dir: RecordDir = None,
    as_json: AsJson = False,
) -> None:
    """List records, oldest first; a file that cannot be read is told on stderr."""
    from pocketllm.evidence import schema
    from pocketllm.evidence.pages import listing
    from pocketllm.evidence.store import list_records, search_dirs

    if kind is not None:
        schema.check_kind(kind)
    folders = search_dirs(record_dir)
    records = list_records(folders, kind, on_problem=lambda error: say(f"warning: {error}"))
    if as_json:
        write_json([entry(record) for record in records])
        return
    if not records:
        say("no records here; `pocketllm bench` and `pocketllm golden verify` write them")
    for line in listing(records) if records else ():
        typer.echo(line)


def show(
    run_id: Id,
    record_dir: RecordDir = None,
    rows: Annotated[bool, typer.Option("--rows", help="With --json: every row too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one record: what was run, results with intervals, checks, machine and code."""
    from pocketllm.errors import OptionError
    from pocketllm.evidence import schema
    from pocketllm.evidence.pages import page
    from pocketllm.evidence.store import read_record, search_dirs

    if rows and not as_json:
        raise OptionError("--rows needs --json")
    record = read_record(run_id, search_dirs(record_dir))
    if as_json:
        value: dict[str, Any] = {"path": str(record.path), "complete": record.complete, "document": record.document}
        value["num_rows"] = len(record.row_dicts)
        if rows:
            value["rows"] = schema.plain(record.row_dicts)
        write_json(value)
        return
    for line in page(record):
        typer.echo(line)


def keep(
    run_id: Id,
    record_dir: RecordDir = None,
    force: Annotated[bool, typer.Option("--force", help="Also an INVALID bench run, as a negative result.")] = False,
) -> None:
    """Copy a record, unchanged, to records/KIND/year=YYYY/ of the working directory, to be reviewed and committed."""
    from pocketllm.evidence import store

    kept = store.keep(run_id, dirs=store.search_dirs(record_dir), force=force)
    say("commit it together with the change it speaks for")
    typer.echo(kept.relative_to(Path.cwd()).as_posix())


def entry(record: Any) -> dict[str, Any]:
    """One record in the JSON list."""
    from pocketllm.evidence.pages import model_of, summary

    document = record.document
    return {
        "run_id": record.run_id,
        "kind": record.kind,
        "complete": record.complete,
        "started_utc": document.get("started_utc"),
        "finished_utc": document.get("finished_utc"),
        "device_class": document.get("device_class"),
        "model": model_of(document).get("name"),
        "summary": summary(record),
        "path": str(record.path),
    }
