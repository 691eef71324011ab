"""`pocketllm golden verify`: ask for every accepted answer again; tables, JSON, JUnit, GitHub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from pocketllm.cli.golden.flags import (
    ApiKey,
    AsJson,
    Cases,
    Engine,
    Fixtures,
    RecordDir,
    ServedModel,
    Url,
    check_folder,
)
from pocketllm.cli.loading import say_fetches

if TYPE_CHECKING:
    from pocketllm.golden.judging.mutations import Mutation
    from pocketllm.golden.verify import Report, Unreferenced

EPILOG = (
    "Examples:\n\npocketllm golden verify\n\n"
    "pocketllm golden verify --case capital --entry-point http_chat --json\n\n"
    "pocketllm golden verify --mutate id   (must end with 1: the check can fail)"
)

CI = "CI"


def verify(
    model: Model = None,
    cases: Cases = None,
    entry_points: Annotated[
        list[str] | None,
        typer.Option(
            "--entry-point", help="in_process, generate, http_chat, http_completions; repeatable. [default: all]"
        ),
    ] = None,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    engine: Engine = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", help="So many requests at a time over HTTP, instead of what each case says."),
    ] = None,
    require: Annotated[
        bool | None,
        typer.Option(
            "--require/--no-require",
            help="Exit 4 when an answer is missing or nothing is compared, not 0.",
            show_default="where CI is set",
        ),
    ] = None,
    strict_ties: Annotated[bool, typer.Option("--strict-ties", help="Exit 1 for a tie too.")] = False,
    unreferenced: Annotated[
        str,
        typer.Option("--unreferenced", help="Fixture files that no case refers to: `warn`, or `reject` with exit 5."),
    ] = "warn",
    mutate: Annotated[
        str | None,
        typer.Option(
            "--mutate",
            help="Change one `id`, `prompt-id`, `logit` or the `template` of a copy of each case: must end with 1.",
        ),
    ] = None,
    fixtures: Fixtures = None,
    record_dir: RecordDir = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write a JUnit file here.", rich_help_panel=CI)] = None,
    github: Annotated[
        bool | None,
        typer.Option(
            "--github/--no-github",
            help="Annotations on stdout, and a step summary.",
            show_default="where GITHUB_ACTIONS is true",
            rich_help_panel=CI,
        ),
    ] = None,
    as_json: AsJson = False,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Ask for every accepted answer again and compare: prompt ids, token ids, logprobs, text, finish reason, usage.

    Exit: 0 identical or a tie · 1 regression, drift, diverged · 2 cannot run · 3 not judged · 4 unrecorded or nothing
    compared, under --require · 5 stale files, under --unreferenced reject.
    """
    from pocketllm.golden.files.folder import default_root
    from pocketllm.golden.verify import VerifyOptions, is_ci
    from pocketllm.golden.verify import verify as run

    check_folder(fixtures)
    output.check_place(junit, "--junit")
    options = VerifyOptions(
        engine=engine_options(
            model=model,
            backend=backend,
            threads=threads,
            activation_dtype=activation_dtype,
            kv_dtype=kv_dtype,
            batch_invariant=batch_invariant,
            max_model_len=max_model_len,
        ),
        cases=tuple(cases or ()),
        entry_points=tuple(entry_points or ()),
        url=url,
        api_key=api_key,
        served_model=served_model,
        peer=engine,
        concurrency=concurrency,
        require=is_ci() if require is None else require,
        strict_ties=strict_ties,
        unreferenced=known_unreferenced(unreferenced),
        mutate=known_mutation(mutate),
        fixtures=fixtures or default_root(),
        record_dir=record_dir,
    )
    report = run(options, lambda row: output.say(f"{row.case} {row.path} {row.check}: {row.outcome.word}"), say_fetches)
    with output.reader_may_leave():
        tell(report, as_json)
    tell_ci(report, junit, github, options.require, options.strict_ties)
    raise typer.Exit(report.exit_code)


def known_mutation(word: str | None) -> "Mutation | None":
    """A mutation by its name; OptionError for another."""
    from pocketllm.errors import OptionError
    from pocketllm.golden.judging.mutations import MUTATIONS

    found = next((one for one in MUTATIONS if one == word), None)
    if word is not None and found is None:
        raise OptionError(f"--mutate {word!r} is unknown; known: {', '.join(MUTATIONS)}")
    return found


def known_unreferenced(word: str) -> "Unreferenced":
    """What to do about stale files; OptionError for another word."""
    from pocketllm.errors import OptionError

    if word == "warn":
        return "warn"
    if word == "reject":
        return "reject"
    raise OptionError(f"--unreferenced {word!r} is unknown; known: warn, reject")


def tell(report: "Report", as_json: bool) -> None:
    """The report on stdout."""
    from pocketllm.golden.reports import text

    if as_json:
        output.write_json(text.as_json(report))
    else:
        text.show(report)


def tell_ci(report: "Report", junit: Path | None, github: bool | None, require: bool, strict_ties: bool) -> None:
    """JUnit file, annotations and step summary, where they are asked for."""
    from pocketllm.golden.reports import ci

    if junit is not None:
        output.write_file(junit, ci.junit(report, require, strict_ties))
    if github is None:
        github = os.environ.get("GITHUB_ACTIONS") == "true"
    if not github:
        return
    with output.reader_may_leave():
        for line in ci.annotations(report, require, strict_ties):
            typer.echo(line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        output.write_file(Path(summary), ci.summary(report, require, strict_ties), append=True)
