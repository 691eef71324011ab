"""`pocketllm golden accept | prune`: what a person decides about fixtures."""

from typing import Annotated

import typer

from pocketllm.cli import output
from pocketllm.cli.engine_options import (
    ActivationDtype,
    Backend,
    BatchInvariant,
    KVDtype,
    MaxModelLen,
    Model,
    Threads,
    engine_options,
)
from pocketllm.cli.golden.flags import Cases, Engine, Fixtures, folder_of
from pocketllm.cli.loading import say_fetches

EPILOG = 'Example:\n\npocketllm golden accept --case capital --reason "first answer, read and right"'


def accept(
    reason: Annotated[str, typer.Option("--reason", help="Why this answer is right; kept in the fixture.")],
    model: Model = None,
    cases: Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeatable.")] = None,
    all_cases: Annotated[bool, typer.Option("--all", help="Everything that is proposed for this model.")] = False,
    engine: Engine = None,
    fixtures: Fixtures = None,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Turn proposals into accepted fixtures: refused in CI, from a dirty tree, or under another hard key."""
    from pocketllm.errors import OptionError
    from pocketllm.golden.recording.accept import accept as run
    from pocketllm.golden.subject import open_subject
    from pocketllm.golden.verify import is_ci

    if bool(cases) == all_cases:
        raise OptionError("say which proposals: --case NAME, or --all")
    subject = open_subject(
        engine_options(
            model=model,
            backend=backend,
            threads=threads,
            activation_dtype=activation_dtype,
            kv_dtype=kv_dtype,
            batch_invariant=batch_invariant,
            max_model_len=max_model_len,
        ),
        engine,
        say_fetches,
    )
    folder = folder_of(subject, fixtures)
    for file in run(subject, folder, cases or folder.pending_names(), reason, is_ci()):
        typer.echo(f"accepted {file}")


def prune(
    model: Model = None,
    cases: Cases = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete them; without it they are only listed.")] = False,
    fixtures: Fixtures = None,
) -> None:
    """List fixture files that no case refers to any more, and with --yes delete them; refused in CI."""
    from pocketllm.golden.recording.accept import prune as run
    from pocketllm.golden.subject import open_subject
    from pocketllm.golden.verify import is_ci

    folder = folder_of(open_subject(engine_options(model=model), progress=say_fetches), fixtures)
    files = folder.stale(cases or ())
    for file in files:
        typer.echo(f"{folder.label(file.path)}: {file.outcome.reason}")
    if not files:
        output.say(f"every answer in {folder.label()} belongs to a case")
    elif yes:
        run(files, is_ci())
        output.say(f"{len(files)} deleted")
    else:
        output.say("nothing is deleted yet: again with --yes")
