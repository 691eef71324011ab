"""`pocketllm golden`: record proposes an answer, a person accepts it, verify asks for it again."""

from pathlib import Path
from typing import Annotated

import typer

from pocketllm.cli import output
from pocketllm.cli.engine_options import (
    ActivationDtype,
    Backend,
    KVDtype,
    MaxModelLen,
    Model,
    Threads,
    engine_options,
)

app = typer.Typer(
    help="Does this checkpoint, through this entry point, still give these tokens?",
    epilog="Example: pocketllm golden verify",
    no_args_is_help=True,
)

Cases = Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeatable. [default: all]")]
Fixtures = Annotated[
    Path | None,
    typer.Option("--fixtures", help="Folder of fixtures, one folder a checkpoint in it. [default: records/fixtures]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(main: typer.Typer) -> None:
    """Add this command to the app."""
    main.add_typer(app, name="golden")


@app.command(
    epilog="Examples:\n\npocketllm golden verify\n\n"
    "pocketllm golden verify --case capital --entry-point http_chat --json\n\n"
    "pocketllm golden verify --mutate id   (must end with 1: the check can fail)"
)
@output.command
def verify(
    model: Model = None,
    cases: Cases = None,
    entry_points: Annotated[
        list[str] | None,
        typer.Option(
            "--entry-point", help="in_process, generate, http_chat, http_completions; repeatable. [default: all]"
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask a running OpenAI-compatible server instead of starting one.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The model's name at --url. [default: the only one it lists]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="POCKETLLM_API_KEY", help="Key for --url.", show_envvar=True)
    ] = None,
    require: Annotated[
        bool, typer.Option("--require", help="Exit 4 when an answer is missing or nothing is compared.")
    ] = False,
    mutate: Annotated[
        str | None,
        typer.Option("--mutate", help="Change one `id` or `prompt-id` of a copy of each case: must end with 1."),
    ] = None,
    fixtures: Fixtures = None,
    record_dir: Annotated[
        Path | None,
        typer.Option(
            "--record-dir", help="Folder of the run record; in CI none is written without it. [default: records/local]"
        ),
    ] = None,
    as_json: AsJson = False,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Ask for every accepted answer again and compare: token ids, prompt ids, text, finish reason, usage.

    Exit: 0 identical · 1 regression · 2 cannot run · 3 not judged · 4 unrecorded or nothing compared, under --require.
    """
    from pocketllm.errors import OptionError
    from pocketllm.golden import report as reports
    from pocketllm.golden.fixture_files import default_root
    from pocketllm.golden.verify import MUTATIONS, VerifyOptions
    from pocketllm.golden.verify import verify as run

    if mutate not in (None, *MUTATIONS):
        raise OptionError(f"--mutate {mutate!r} is unknown; known: {', '.join(MUTATIONS)}")
    if fixtures is not None and not fixtures.is_dir():
        raise OptionError(f"--fixtures {fixtures} is no folder: nothing could be compared")
    options = VerifyOptions(
        engine=engine_options(
            model=model,
            backend=backend,
            threads=threads,
            activation_dtype=activation_dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
        ),
        cases=tuple(cases or ()),
        entry_points=tuple(entry_points or ()),
        url=url,
        api_key=api_key,
        served_model=served_model,
        require=require,
        mutate="id" if mutate == "id" else "prompt-id" if mutate else None,
        fixtures=fixtures or default_root(),
        record_dir=record_dir,
    )
    report = run(options, lambda row: output.say(f"{row.case} {row.path} {row.check}: {row.outcome.word}"))
    if as_json:
        output.write_json(reports.as_json(report))
    else:
        reports.show(report)
    raise typer.Exit(report.exit_code)


@app.command(
    epilog="Examples:\n\npocketllm golden record cases.toml\n\n"
    'pocketllm golden record --case capital --chat "What is the capital of France?" --max-tokens 32\n\n'
    "pocketllm golden record   (every accepted case again)"
)
@output.command
def record(
    cases_file: Annotated[
        Path | None,
        typer.Argument(metavar="[CASES.toml]", help="A table a case: purpose, messages or prompt, sampling, paths."),
    ] = None,
    model: Model = None,
    cases: Cases = None,
    chat: Annotated[str | None, typer.Option("--chat", help="A user message; names the case with --case.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A plain prompt; names the case with --case.")] = None,
    purpose: Annotated[str | None, typer.Option("--purpose", help="What the case is there to catch.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer, with --chat or --prompt.")] = 32,
    fixtures: Fixtures = None,
    as_json: AsJson = False,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Ask three times in this process and propose the answer as `*.pending`; `golden accept` makes it count."""
    import sys

    from pocketllm.evidence.provenance.redaction import redact
    from pocketllm.golden.fixture_files import FixtureFolder, default_root
    from pocketllm.golden.record import Proposal, choose_requests
    from pocketllm.golden.record import record as run
    from pocketllm.golden.subject import open_subject

    subject = open_subject(
        engine_options(
            model=model,
            backend=backend,
            threads=threads,
            activation_dtype=activation_dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
        )
    )
    folder = FixtureFolder((fixtures or default_root()) / subject.name)
    asked = choose_requests(
        folder, cases_file, cases or [], chat=chat, prompt=prompt, purpose=purpose, max_tokens=max_tokens
    )

    def tell(proposal: Proposal) -> None:
        answer = proposal.answer
        bits = "bit-identical" if answer.is_bit_identical else "equal in tokens, not in bits"
        output.say(
            f"{proposal.case.name}: {len(answer.expected.token_ids)} tokens, {answer.expected.finish_reason}, "
            f"smallest margin {answer.smallest_margin:.3f} nat, repeats {bits}"
        )

    proposals = run(subject, folder, asked, ["pocketllm", *redact(sys.argv)[1:]], tell)
    if as_json:
        output.write_json([proposal.as_dict() for proposal in proposals])
    else:
        for proposal in proposals:
            typer.echo(f"{proposal.case.name}: {proposal.answer.expected.text!r}")
            typer.echo("  " + ", ".join(str(file) for file in proposal.files))
        typer.echo('review the files, then: pocketllm golden accept --all --reason "…"')


@app.command(epilog='Example:\n\npocketllm golden accept --case capital --reason "first answer, read and right"')
@output.command
def accept(
    reason: Annotated[str, typer.Option("--reason", help="Why this answer is right; kept in the fixture.")],
    model: Model = None,
    cases: Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeatable.")] = None,
    all_cases: Annotated[bool, typer.Option("--all", help="Everything that is proposed for this model.")] = False,
    fixtures: Fixtures = None,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Turn proposals into accepted fixtures: refused in CI, from a dirty tree, or under another hard key."""
    from pocketllm.errors import OptionError
    from pocketllm.golden.fixture_files import FixtureFolder, default_root
    from pocketllm.golden.record import accept as run
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
            max_model_len=max_model_len,
        )
    )
    folder = FixtureFolder((fixtures or default_root()) / subject.name)
    for file in run(subject, folder, cases or folder.pending_names(), reason, is_ci()):
        typer.echo(f"accepted {file}")
