"""`pocketllm bench --arms …`, and its subcommands: one file each, with a `register(bench)`, named in SUBCOMMANDS."""

from types import ModuleType

import typer

from pocketllm.cli.bench import calibrate, command, gate, recipes, report

SUBCOMMANDS: tuple[ModuleType, ...] = (gate, calibrate, recipes, report)


def register(app: typer.Typer) -> None:
    """Add this command and its subcommands to the app."""
    bench = typer.Typer()
    bench.callback(invoke_without_command=True, epilog=command.EPILOG)(command.bench)
    for module in SUBCOMMANDS:
        module.register(bench)
    app.add_typer(bench, name="bench")
