"""`pocketllm records`: run records, one Parquet file a run: look at them, ask them, take them in and out."""

import typer

from pocketllm.cli.output import command
from pocketllm.cli.records.browse import keep, ls, show
from pocketllm.cli.records.exchange import export, import_results
from pocketllm.cli.records.questions import diff, sql, trend, verify

COMMANDS = (
    ("ls", ls, "pocketllm records ls --kind bench"),
    ("show", show, "pocketllm records show 01K9ZQ"),
    ("keep", keep, "pocketllm records keep 01K9ZQ"),
    ("sql", sql, "pocketllm records sql \"select scenario, arm, ratio, verdict from results where metric = 'decode'\""),
    ("diff", diff, "pocketllm records diff 01K9ZQ 01K9ZR"),
    ("trend", trend, "pocketllm records trend --metric decode"),
    ("verify", verify, "pocketllm records verify"),
    ("export", export, "pocketllm records export 01K9ZQ --to llama-bench > run.jsonl"),
    ("import", import_results, "pocketllm records import vllm-results.json"),
)


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Run records: what was measured or proved, one Parquet file a run.",
        epilog="Example: pocketllm records ls",
    )
    for name, function, example in COMMANDS:
        group.command(name, epilog=f"Example: {example}")(command(function))
    app.add_typer(group, name="records")
