"""Flags that the subcommands of `pocketllm records` share."""

from pathlib import Path
from typing import Annotated

import typer

RecordDir = Annotated[
    Path | None,
    typer.Option("--record-dir", help="Look here only. [default: ./records and the user's data folder]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Id = Annotated[
    str, typer.Argument(metavar="ID", help="The beginning of a record's id, or its file.", show_default=False)
]
