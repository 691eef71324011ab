"""`pocketllm records export | import`: records in the formats of other tools, and their figures as records."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pocketllm.cli.output import say
from pocketllm.cli.records.flags import Id, RecordDir

FORMATS = ("llama-bench", "vllm-json", "junit")


def export(
    run_id: Id,
    to: Annotated[str, typer.Option("--to", help="llama-bench (JSON lines), vllm-json, or junit.")],
    arm: Annotated[str | None, typer.Option("--arm", help="Only this arm.", show_default="all arms")] = None,
    record_dir: RecordDir = None,
) -> None:
    """Print a bench record as llama-bench or vLLM would have saved it, or as a JUnit file; on stdout.

    Those formats hold single arms: pairing, intervals, null arm and verdict stay behind (JUnit keeps the verdict).
    """
    from pocketllm.bench.reports import ci
    from pocketllm.bench.reports import export as formats
    from pocketllm.errors import OptionError
    from pocketllm.evidence.store import read_record, search_dirs

    if to not in FORMATS:
        raise OptionError(f"--to {to!r}: known is {', '.join(FORMATS)}")
    if to == "junit" and arm is not None:
        raise OptionError("junit tells of arms against the baseline: leave --arm out")
    record = read_record(run_id, search_dirs(record_dir))
    if record.kind != "bench":
        raise OptionError(f"record {record.run_id} is of kind {record.kind}: only bench records can be exported")
    document = one_arm(record.document, arm)
    if to == "junit":
        typer.echo(ci.junit({**document, "complete": record.complete}, None), nl=False)
    elif to == "llama-bench":
        for entry in formats.llama_bench(document, record.row_dicts):
            typer.echo(json.dumps(entry, ensure_ascii=False))
    else:
        entries = formats.vllm_json(document, record.row_dicts)
        typer.echo(json.dumps(entries[0] if len(entries) == 1 else entries, ensure_ascii=False, indent=2))


def one_arm(document: dict[str, Any], arm: str | None) -> dict[str, Any]:
    """The document with one arm only, when asked; OptionError names the known ones."""
    from pocketllm.errors import OptionError

    if arm is None:
        return document
    arms = [entry for entry in document["arms"] if entry["name"] == arm]
    if not arms:
        names = ", ".join(str(entry["name"]) for entry in document["arms"])
        raise OptionError(f"--arm {arm!r} is not in this record; arms: {names}")
    return {**document, "arms": arms}


def import_results(
    files: Annotated[
        list[Path], typer.Argument(help="Result files of `vllm bench serve`, or llama-bench JSON (lines).")
    ],
    source: Annotated[
        str | None, typer.Option("--from", help="vllm-bench or llama-bench.", show_default="found out")
    ] = None,
    record_dir: Annotated[
        Path | None, typer.Option("--record-dir", help="Where the records go.", show_default="records/local")
    ] = None,
) -> None:
    """Take figures of another tool in as records of kind `imported`, to be looked at beside ours; never a verdict."""
    from pocketllm.evidence.imports import read_results
    from pocketllm.evidence.store import RecordWriter
    from pocketllm.evidence.store import record_dir as writable_dir

    # all files are read before anything is written
    found = [(path, document, rows) for path in files for document, rows in read_results(path, source)]
    folder = writable_dir(record_dir)
    for path, document, rows in found:
        with RecordWriter("imported", {**document, "file": path.name}, folder) as record:
            record.append(rows)
        say(f"{path.name}: {len(rows)} figures of {document['source']}")
        typer.echo(record.run_id)
