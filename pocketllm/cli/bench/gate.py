"""`pocketllm bench gate`: a record, or a fresh run, as a gate of CI: exit code, JUnit file, GitHub annotations."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli.bench.terminal import paint, show
from pocketllm.cli.output import check_place, command, reader_may_leave, say, write_file

if TYPE_CHECKING:
    from pocketllm.bench.analysis.verdict import Require

EPILOG = """Examples:

pocketllm bench gate 01K9ZQ --require same-or-faster

pocketllm bench gate --junit bench.xml --scenario decode --arms base:path=../base --arms new:path=. --budget 10m
"""


def register(bench: typer.Typer) -> None:
    """Add this subcommand to `bench`."""
    settings = {"ignore_unknown_options": True}
    bench.command("gate", epilog=EPILOG, context_settings=settings)(gate)


@command
def gate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ID | FLAGS",
            help="A bench record by its id or file, or the flags of `pocketllm bench` for a fresh run.",
            show_default=False,
        ),
    ],
    require: Annotated[
        str | None,
        typer.Option("--require", help="`same-or-faster`: exit 4 when the run cannot rule a slowdown out."),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write a JUnit file here.")] = None,
    github: Annotated[
        bool | None,
        typer.Option(
            "--github/--no-github",
            help="Annotations on stdout, and a step summary.",
            show_default="where GITHUB_ACTIONS is true",
        ),
    ] = None,
    record_dir: Annotated[
        Path | None, typer.Option("--record-dir", help="Where records are, and where a fresh run's goes.")
    ] = None,
) -> None:
    """End with the exit code of a gate: 0 passed, 1 SLOWER, 3 INVALID or not judged, 4 under-powered under --require.

    A fresh run takes the flags of `pocketllm bench`: its arms are interleaved here and now, which is what makes a gate
    on a shared runner worth its minutes. A record made earlier is only read.
    """
    from pocketllm.bench.analysis.verdict import Require
    from pocketllm.errors import OptionError

    known = [item.value for item in Require]
    if require is not None and require not in known:
        raise OptionError(f"--require {require!r}: known is {', '.join(known)}")
    check_place(junit, "--junit")
    asked = Require(require) if require else None
    if not words[0].startswith("-"):
        if words[1:]:
            raise OptionError(f"{words[0]} is a record, whose run is over: leave {' '.join(words[1:])} out")
        document = recorded(words[0], record_dir)
    else:
        document = fresh_run(words, require, record_dir)
    raise typer.Exit(tell(document, asked, junit, github))


def recorded(run_id: str, record_dir: Path | None) -> Mapping[str, Any]:
    """The document of a bench record, its report printed."""
    from pocketllm.bench.reports.readable import check_readable
    from pocketllm.bench.reports.text import render
    from pocketllm.errors import OptionError
    from pocketllm.evidence.pages.layout import columns
    from pocketllm.evidence.store import read_record, search_dirs

    record = read_record(run_id, search_dirs(record_dir))
    if record.kind != "bench":
        raise OptionError(
            f"record {record.run_id} is of kind {record.kind}: a gate reads the verdicts of a bench record"
        )
    check_readable(record.document)
    with reader_may_leave():
        show(render(record.document, paint(), width=columns()))
    return {**record.document, "complete": record.complete}


def fresh_run(words: Sequence[str], require: str | None, record_dir: Path | None) -> Mapping[str, Any]:
    """Run `pocketllm bench` with these flags; a run that ends without a record is a document that says so."""
    from pocketllm.cli.bench import command as bench

    ended: list[Mapping[str, Any]] = []
    gates = ["--fail-on", "slower", *(["--require", require] if require else [])]
    place = ["--record-dir", str(record_dir)] if record_dir else []
    app = typer.Typer(rich_markup_mode="rich" if sys.stderr.isatty() else None)  # its box breaks sentences
    app.command()(bench.bench)
    code: Any = 0
    try:
        # not app(): it would end the process where a bad flag is told
        typer.main.get_command(app).main([*words, *gates, *place], prog_name="pocketllm bench", obj=ended.append)
    except SystemExit as end:
        code = end.code
    if ended:
        return ended[-1]
    if code == 2:
        raise typer.Exit(2)
    reason = f"the benchmark ended with exit code {code} and without a record; its own words are above"
    return {"scenario": "bench", "complete": True, "valid": False, "results": [], "arms": [], "checks": [note(reason)]}


def note(reason: str) -> dict[str, Any]:
    """A check that carries a reason."""
    return {"code": "not judged:", "severity": "run", "value": None, "detail": reason, "blocks": []}


def tell(document: Mapping[str, Any], require: "Require | None", junit: Path | None, github: bool | None) -> int:
    """JUnit file, annotations, step summary; returns the exit code."""
    from pocketllm.bench.reports import ci
    from pocketllm.bench.reports.text import render

    if junit is not None:
        write_file(junit, ci.junit(document, require))
    if github is None:
        github = os.environ.get("GITHUB_ACTIONS") == "true"
    if github:
        with reader_may_leave():
            for line in ci.annotations(document, require):
                typer.echo(line)
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            report = render(document) if document.get("run_id") else ""
            write_file(Path(summary), ci.summary(document, require, report), append=True)
    code = ci.gate_code(document, require)
    for case in ci.cases(document, require):
        say(f"gate: {case.state}: {case.name}: {case.word}")
    return code
