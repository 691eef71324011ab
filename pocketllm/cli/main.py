"""The Typer app: one line a command. `--help` imports no torch and answers in under 0.3 s."""

import typer

from pocketllm.cli import bench, check, generate, golden, inspect, models, records, serve

app = typer.Typer(
    name="pocketllm",
    help="Honest benchmarking and golden verification, over a full LLM inference engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (generate, serve, bench, golden, models, inspect, records, check):
    module.register(app)


def version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        from pocketllm import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main(
    show_version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
) -> None:
    """Honest benchmarking and golden verification, over a full LLM inference engine."""
