"""The Typer app: one line a command. `--help` imports no torch and answers in under 0.3 s."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from pocketllm.cli import bench, check, generate, golden, inspect, models, records, serve


class Group(TyperGroup):
    """The commands, with errors of usage in whole lines where no terminal shows them: rich's box breaks sentences."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line and run a command."""
        if sys.stderr is None or not sys.stderr.isatty():  # None: closed by whoever called
            self.rich_markup_mode = None
        return super().main(*args, **kwargs)

    def format_help(self, *args: Any) -> None:
        """The list of commands, which has no sentences to break."""
        self.rich_markup_mode = "rich"
        super().format_help(*args)


app = typer.Typer(
    name="pocketllm",
    cls=Group,
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
    if any(name.startswith("POCKETLLM_") for name in os.environ):
        warn_of_variables()


def warn_of_variables() -> None:
    """A line on stderr for each variable that looks like ours and is none."""
    from pocketllm.cli.output import open_closed_streams, printable, say_warning
    from pocketllm.engine.options import warnings_of

    open_closed_streams()
    for sentence in warnings_of(os.environ):
        say_warning(printable(sentence))
