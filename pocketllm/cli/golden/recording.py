"""`pocketllm golden record | suggest`: propose answers, and find prompts that make good ones."""

import sys
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
    folder_of,
    same_key,
)
from pocketllm.cli.loading import say_fetches

if TYPE_CHECKING:
    from pocketllm.golden.recording.record import Proposal
    from pocketllm.golden.recording.suggest import Suggestion

EPILOG = (
    "Examples:\n\npocketllm golden record cases.toml\n\n"
    'pocketllm golden record --case capital --chat "Name the capital of France." --max-tokens 32\n\n'
    "pocketllm golden record   (every accepted case again)\n\n"
    "pocketllm golden record --url http://127.0.0.1:8080 --engine llama.cpp"
)
SUGGEST_EPILOG = "Example:\n\npocketllm golden suggest prompts.txt --chat --max-tokens 32"


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
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    engine: Engine = None,
    fixtures: Fixtures = None,
    record_dir: RecordDir = None,
    as_json: AsJson = False,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Ask three times, measure the noise, and propose the answer as `*.pending`; `golden accept` makes it count.

    Refused in CI, and for an answer whose smallest margin is within three times its own noise.
    """
    from pocketllm.errors import OptionError, RecordError
    from pocketllm.evidence.provenance.redaction import redact
    from pocketllm.golden.files.folder import HERE
    from pocketllm.golden.judging.judge import ServerAt
    from pocketllm.golden.recording.peer import record_peer
    from pocketllm.golden.recording.record import choose_requests
    from pocketllm.golden.recording.record import record as run
    from pocketllm.golden.subject import open_subject
    from pocketllm.golden.verify import is_ci

    if is_ci():
        raise RecordError("CI is set: nothing is proposed there; record on a machine where a person reviews it")
    if (url is None) != (engine is None):
        raise OptionError("--url and --engine go together: the answers of a server are filed under its engine's name")
    options = engine_options(
        model=model,
        backend=backend,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
    )
    subject = open_subject(options, engine, say_fetches)
    # a case of one's own belongs to where one works, not to the checkout whose cases are found from everywhere
    is_new = cases_file is not None or chat is not None or prompt is not None
    folder = folder_of(subject, fixtures or (HERE if is_new else None))
    asked = choose_requests(
        folder, cases_file, cases or [], chat=chat, prompt=prompt, purpose=purpose, max_tokens=max_tokens
    )
    command = ["pocketllm", *redact(sys.argv)[1:]]
    if url is None:
        proposals = run(subject, folder, asked, command, tell, record_dir)
    else:
        at = ServerAt(url, api_key, served_model)
        proposals = record_peer(subject, folder, asked, at, command, tell, record_dir)
    if as_json:
        output.write_json([proposal.as_dict() for proposal in proposals])
        return
    for proposal in proposals:
        typer.echo(f"{proposal.case.name}: {proposal.answer.expected.text!r}")
        typer.echo("  " + ", ".join(str(file) for file in proposal.files))
    flags = same_key(options, engine, fixtures)
    typer.echo(f'next: pocketllm golden review{flags}, or: pocketllm golden accept --all --reason "…"{flags}')


def tell(proposal: "Proposal") -> None:
    """One line about a proposal, on stderr."""
    answer, noise = proposal.answer, proposal.answer.noise
    bits = "bit-identical" if noise.is_bit_identical else "equal in tokens, not in bits"
    margin = f"smallest margin {answer.smallest_margin:.3f} nat" if answer.positions else "no logprobs are shown"
    output.say(
        f"{proposal.case.name}: {len(answer.expected.token_ids)} tokens, {answer.expected.finish_reason}, {margin}, "
        f"repeats {bits}, noise p99 {noise.floor.p99:.2g} nat"
    )


def suggest(
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS.txt", help="A prompt a line; `-` reads standard input.")],
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each line is a user message, not a plain prompt.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 32,
    tie_probe: Annotated[
        bool, typer.Option("--tie-probe", help="Keep prompts with a small margin: tag them, do not refuse them.")
    ] = False,
    as_json: AsJson = False,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Rank prompts by the smallest margin of their answers: the clearest makes the best golden. Writes nothing.

    A margin below three times the prompt's own noise is refused: another machine could turn such an answer over.
    """
    from pocketllm.golden.recording.suggest import requests_of
    from pocketllm.golden.recording.suggest import suggest as run
    from pocketllm.golden.subject import open_subject

    asked = requests_of(read_lines(prompts), is_chat=chat, max_tokens=max_tokens, is_probe=tie_probe)
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
        progress=say_fetches,
    )
    found = run(subject, asked, lambda one: output.say(f"{one.case.name}: {one.margin:.3f} nat"))
    if as_json:
        output.write_json([one.as_dict() for one in found])
    else:
        show(found)


def read_lines(path: Path) -> list[str]:
    """Lines of a text file or of standard input; OptionError when they cannot be read."""
    from pocketllm.errors import OptionError

    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}; give a file with a prompt a line") from error


def show(found: "list[Suggestion]") -> None:
    """A line a prompt, the clearest first."""
    from rich.table import Table

    from pocketllm.evidence.pages.layout import UNBOUNDED
    from pocketllm.golden.reports.console import open_console

    console = open_console()
    table = Table(box=None, padding=(0, 1), header_style="bold", expand=console.width < UNBOUNDED)
    for title in ("margin", "at least"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for title in ("prompt", "answer"):
        table.add_column(title, no_wrap=True, overflow="ellipsis", ratio=1)
    for one in found:
        word = "no text" if one.is_empty else "refused" if one.is_refused else "good" if one.is_clear else "tie-probe"
        prompt = one.case.prompt or one.case.messages[0]["content"]
        table.add_row(f"{one.margin:.3f}", f"{one.least:.3f}", word, prompt, repr(one.answer.expected.text))
    console.print(table)
    for one in found:
        if one.is_empty:
            output.say(f"{one.case.name}: {one.reason}")
