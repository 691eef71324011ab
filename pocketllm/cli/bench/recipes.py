"""`pocketllm bench recipes`: how other servers are started as arms."""

from typing import Annotated

import typer

from pocketllm.cli.output import command, write_json

EPILOG = """Examples:

pocketllm bench recipes

pocketllm bench --arms ours:via=http --arms 'llama.cpp:recipe=llama-server,args=--no-mmap'
"""


def register(bench: typer.Typer) -> None:
    """Add this subcommand."""
    bench.command("recipes", epilog=EPILOG)(recipes)


@command
def recipes(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """List the recipes that `--arms NAME:recipe=…` knows, each with the command line that it runs."""
    from pocketllm.bench.arm.recipes import recipes as known

    if as_json:
        write_json({name: dict(recipe) for name, recipe in known().items()})
        return
    for name, recipe in known().items():
        typer.echo(f"{name}: {recipe['about']}\n  {recipe['command']}\n  ready when {recipe['ready']} answers 200")
        for variable, value in recipe.get("environment", {}).items():
            typer.echo(f"  {variable}={value}")
