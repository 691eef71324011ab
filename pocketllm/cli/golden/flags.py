"""Flags that the subcommands of `pocketllm golden` share."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pocketllm.engine.options import EngineOptions
    from pocketllm.golden.files.folder import FixtureFolder
    from pocketllm.golden.subject import Subject

Cases = Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeatable. [default: all]")]
Fixtures = Annotated[
    Path | None,
    typer.Option("--fixtures", help="Folder of fixtures, one folder a checkpoint in it. [default: records/fixtures]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RecordDir = Annotated[
    Path | None,
    typer.Option(
        "--record-dir", help="Folder of the run record; in CI none is written without it. [default: records/local]"
    ),
]
Url = Annotated[
    str | None, typer.Option("--url", help="Ask a running OpenAI-compatible server instead of this engine.")
]
ServedModel = Annotated[
    str | None, typer.Option("--served-model", help="The model's name at --url. [default: the only one it lists]")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="POCKETLLM_API_KEY", help="Key for --url.", show_envvar=True)
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Name of the other engine at --url, such as llama.cpp: it has answers of its own."),
]


def folder_of(subject: "Subject", fixtures: Path | None) -> "FixtureFolder":
    """The fixtures of a checkpoint."""
    from pocketllm.golden.files.folder import FixtureFolder, default_root

    return FixtureFolder((fixtures or default_root()) / subject.name)


def check_folder(fixtures: Path | None) -> None:
    """OptionError for a folder that is given and not there: nothing could be compared, and that is no pass."""
    from pocketllm.errors import OptionError

    if fixtures is not None and not fixtures.is_dir():
        raise OptionError(f"--fixtures {fixtures} is no folder: nothing could be compared")


def same_key(options: "EngineOptions", engine: str | None, fixtures: Path | None) -> str:
    """The flags of this command without which another would look for answers under another key."""
    from pocketllm.engine.options import as_flag

    named = ("model", "backend", "threads", "activation_dtype", "kv_dtype", "batch_invariant", "max_model_len")
    flags = [as_flag(name, getattr(options, name)) for name in named if options.sources.get(name) == "flag"]
    flags += [f"--engine={engine}"] if engine else []
    flags += [f"--fixtures={fixtures}"] if fixtures else []
    return "".join(f" {shlex.quote(flag)}" for flag in flags)
