"""Verify: ask every selected case through every entry point it names, compare, and write one run record.

Verify only reads fixtures. Outcomes are types (see `compare`); absence never scores as a pass.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.golden.compare import (
    Identical,
    NotJudged,
    Observed,
    Outcome,
    Regression,
    Unrecorded,
    compare,
    exit_code,
)
from pocketllm.golden.fixture import ENTRY_POINTS, HTTP_ENTRY_POINTS, Answer, Case, ServedPath
from pocketllm.golden.fixture_files import FixtureFolder, default_root

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine
    from pocketllm.engine.options import EngineOptions
    from pocketllm.golden.entry_points import Client
    from pocketllm.golden.entry_points.http import HttpClient
    from pocketllm.golden.served_path import Server
    from pocketllm.golden.subject import Subject

Mutation = Literal["id", "prompt-id"]
MUTATIONS = ("id", "prompt-id")
LONG_ENOUGH_TOKENS = 16
"""An answer in flight when SIGTERM arrives: long beside the time a signal takes, short beside a test suite."""


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify and where to write; no field is clamped or guessed."""

    engine: "EngineOptions"
    cases: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    url: str | None = None
    api_key: str | None = None
    served_model: str | None = None
    """The model's name at `url`; None asks the server for its only one."""
    require: bool = False
    mutate: Mutation | None = None
    """Change one expected id, or one prompt id, of a copy of each case: the run must come out red."""
    fixtures: Path = field(default_factory=default_root)
    record_dir: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.entry_points if name not in ENTRY_POINTS]
        if unknown:
            raise OptionError(f"no entry point {unknown[0]!r}; known: {', '.join(ENTRY_POINTS)}")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise OptionError(f"--url {self.url!r} is no http address, such as http://127.0.0.1:8000")
        if self.url is None and self.served_model is not None:
            raise OptionError(f"--served-model {self.served_model!r} goes with --url: it names a model of that server")
        local = [name for name in self.entry_points if name not in HTTP_ENTRY_POINTS]
        if self.url and local:
            raise OptionError(f"--url is asked over HTTP only: {local[0]} runs in this machine's own engine")

    @property
    def writes_record(self) -> bool:
        """A mutated run proves nothing about the model; in CI a record is written only where one was asked for."""
        return self.mutate is None and (self.record_dir is not None or not is_ci())


@dataclass(frozen=True)
class Row:
    """One thing that was checked."""

    case: str
    path: ServedPath
    check: Literal["tokens", "cancel", "shutdown"]
    outcome: Outcome
    observed: Observed = field(default_factory=Observed)


@dataclass(frozen=True)
class Report:
    """All rows of one verification, and what they add up to."""

    subject: "Subject"
    fixtures: FixtureFolder
    rows: tuple[Row, ...]
    exit_code: int
    record: Path | None = None
    mutate: Mutation | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One case to be asked along one path."""

    case: Case
    answer: Answer
    path: ServedPath
    unrecorded: str = ""
    """Why the answer is not this request's: then only the prompt ids are judged."""


def is_ci() -> bool:
    """Whether the environment says that no person is watching."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def verify(options: VerifyOptions, on_row: Callable[[Row], None] = lambda row: None) -> Report:
    """Run a verification; `on_row` sees each row as soon as it is judged.

    Raises PocketLLMError for what cannot be run at all: no such model, a broken fixture, an unwritable record folder.
    """
    from pocketllm.golden.subject import open_subject

    return verify_subject(open_subject(options.engine), options, on_row)


def verify_subject(
    subject: "Subject", options: VerifyOptions, on_row: Callable[[Row], None] = lambda row: None
) -> Report:
    """`verify` for a checkpoint that is opened already."""
    folder = FixtureFolder(options.fixtures / subject.name)
    cases = folder.cases(options.cases)
    with ExitStack() as stack:
        record = stack.enter_context(_open_record(subject, options, folder, cases)) if options.writes_record else None
        rows = []
        for row in judge(subject, options, folder, cases):
            rows.append(row)
            if record is not None:
                record.append(record_row(row, folder))
            on_row(row)
    return Report(
        subject=subject,
        fixtures=folder,
        rows=tuple(rows),
        exit_code=exit_code([row.outcome for row in rows], options.require),
        record=record.path if record is not None else None,
        mutate=options.mutate,
        notes=tuple(_notes(subject, options, folder, cases, rows)),
    )


def _notes(
    subject: "Subject", options: VerifyOptions, folder: FixtureFolder, cases: Sequence[Case], rows: Sequence[Row]
) -> Iterator[str]:
    """What a reader would otherwise take for granted."""
    if not cases:
        yield f"no case is recorded for {subject.name} in {folder.label()}: nothing was compared"
    elif not rows:
        yield "no selected case has a selected entry point: nothing was compared"
    if options.url and rows:
        yield "the hard key of a server at --url is not known: it was held to the answers recorded for this machine"
    if options.mutate:
        yield "no run record: a mutated run says nothing about the model"
    elif not options.writes_record:
        yield "no run record: CI is set, and --record-dir was not given"


def _open_record(subject: "Subject", options: VerifyOptions, folder: FixtureFolder, cases: Sequence[Case]) -> Any:
    from pocketllm.evidence.device_class import device_class
    from pocketllm.evidence.store import RecordWriter, record_dir

    document = {
        "device_class": device_class(subject.plan.as_dict()),
        "model": dict(subject.model),
        "plan": subject.plan.as_dict(),
        "selection": {
            "cases": [case.name for case in cases],
            "entry_points": list(options.entry_points or ENTRY_POINTS),
            "url": options.url,
        },
    }
    return RecordWriter("golden", document, record_dir(options.record_dir))


def record_row(row: Row, folder: FixtureFolder) -> dict[str, Any]:
    """A row as the record has it."""
    outcome, observed = row.outcome, row.observed
    told = outcome if isinstance(outcome, Regression) else None
    return {
        "case": row.case,
        "fixture_sha256": folder.sha256(row.case),
        "entry_point": row.path.entry_point,
        "check": row.check,
        "stream": row.path.is_stream,
        "concurrency": row.path.concurrency,
        "outcome": outcome.word,
        "position": told.position if told else None,
        "margin": told.margin if told else None,
        "regret": told.regret if told else None,
        "n_prompt": observed.num_prompt_tokens,
        "n_out": observed.num_output_tokens,
        "detail": describe(outcome),
        "ttft_s": observed.ttft_s,
        "e2el_s": observed.e2el_s,
    }


def describe(outcome: Outcome) -> str:
    """An outcome in a clause, token ids as numbers."""
    match outcome:
        case Identical(scope=scope):
            return "" if scope == "ids" else "text only: the server shows no token ids"
        case Unrecorded(reason=reason) | NotJudged(reason=reason):
            return reason
        case Regression():
            where = f" at {outcome.position}: expected {outcome.expected}, served {outcome.got}"
            detail = f"; {outcome.detail}" if outcome.detail else ""
            return outcome.what + (where if outcome.position is not None else "") + detail


# -- judging -----------------------------------------------------------------------------------------------------------
def judge(subject: "Subject", options: VerifyOptions, folder: FixtureFolder, cases: Sequence[Case]) -> Iterator[Row]:
    """Rows of all selected cases, one entry point after the other, so that two engines never share the machine."""
    jobs: list[Job] = []
    for case in cases:
        answer, reason = folder.answer(case, subject.hard_key)
        answer = answer or folder.answer_of_changed(case, subject.hard_key)
        for path in selected_paths(case, options):
            if answer is None:
                yield Row(case.name, path, "tokens", Unrecorded(reason))
            else:
                jobs.append(Job(*mutated(case, answer, options.mutate), path, reason))
    for entry_point in ("in_process", "generate"):
        yield from _judge_local(entry_point, subject, [job for job in jobs if job.path.entry_point == entry_point])
    http = [job for job in jobs if job.path.is_http]
    if http:
        yield from _judge_http(subject, options, http)


def selected_paths(case: Case, options: VerifyOptions) -> list[ServedPath]:
    """The paths of a case that were asked for, in the case's order."""
    wanted = options.entry_points or (HTTP_ENTRY_POINTS if options.url else ENTRY_POINTS)
    return [path for path in case.paths if path.entry_point in wanted]


def mutated(case: Case, answer: Answer, mutate: Mutation | None) -> tuple[Case, Answer]:
    """The pair itself, or a copy with one id in the middle changed: a check that cannot fail is no check."""
    match mutate:
        case None:
            return case, answer
        case "id":
            ids = _with_one_changed(answer.expected.token_ids)
            return case, replace(answer, expected=replace(answer.expected, token_ids=ids))
        case "prompt-id":
            return replace(case, prompt_token_ids=_with_one_changed(case.prompt_token_ids)), answer


def _with_one_changed(ids: tuple[int, ...]) -> tuple[int, ...]:
    middle = len(ids) // 2
    return (*ids[:middle], ids[middle] ^ 1, *ids[middle + 1 :])


def _judge_local(entry_point: str, subject: "Subject", jobs: Sequence[Job]) -> Iterator[Row]:
    from pocketllm.golden.entry_points import open_client

    if jobs:
        with open_client(entry_point, subject) as client:
            for job in jobs:
                yield ask(client, job)


def ask(client: "Client", job: Job, unstreamed_text: str | None = None) -> Row:
    """Ask one case along one path and judge it."""
    try:
        observed = client.answer(job.case, job.path.is_stream)
    except NotJudgedError as error:
        return Row(job.case.name, job.path, "tokens", NotJudged(str(error)))
    outcome = compare(job.case, job.answer, observed, unstreamed_text)
    if job.unrecorded and not (isinstance(outcome, Regression) and outcome.what == "prompt ids"):
        outcome = Unrecorded(job.unrecorded)
    return Row(job.case.name, job.path, "tokens", outcome, observed)


def _judge_http(subject: "Subject", options: VerifyOptions, jobs: Sequence[Job]) -> Iterator[Row]:
    from pocketllm.golden.entry_points.http import HttpClient, served_model
    from pocketllm.golden.served_path import launch, serve_command

    with ExitStack() as stack:
        server: Server | None = None
        try:
            if options.url is None:
                command = serve_command(subject.engine_flags())
                server = stack.enter_context(launch(command))
            url = options.url or (server.url if server else "")
            model = options.served_model or served_model(url, options.api_key)
        except NotJudgedError as error:
            yield from (Row(job.case.name, job.path, "tokens", NotJudged(str(error))) for job in jobs)
            return
        client = HttpClient(url, model, options.api_key)
        stack.callback(client.close)
        yield from _with_log(_ask_all(client, jobs), server)
        recorded = [job for job in jobs if not job.unrecorded]
        if server is not None and recorded:
            yield from _with_log(_judge_endings(server, client, recorded), server)


def _with_log(rows: Iterator[Row], server: "Server | None") -> Iterator[Row]:
    """Rows as they are; a row that could not be judged because our server died says so, with the end of its log."""
    for row in rows:
        if isinstance(row.outcome, NotJudged) and server is not None and server.exit_code not in (None, 0):
            reason = f"{row.outcome.reason}; the server ended with code {server.exit_code}{server.log_tail()}"
            yield replace(row, outcome=NotJudged(reason))
        else:
            yield row


def _ask_all(client: "HttpClient", jobs: Sequence[Job]) -> Iterator[Row]:
    """One request at a time first, then two at a time."""
    unstreamed: dict[tuple[str, str], str] = {}
    for job in sorted((job for job in jobs if job.path.concurrency == 1), key=lambda job: job.path.is_stream):
        twin = (job.case.name, job.path.entry_point)
        row = ask(client, job, unstreamed.get(twin) if job.path.is_stream else None)
        if not job.path.is_stream and row.observed.status == 200 and not isinstance(row.outcome, NotJudged):
            unstreamed[twin] = row.observed.text
        yield row
    wide = [job for job in jobs if job.path.concurrency == 2]
    for pair in pairs(wide):
        with ThreadPoolExecutor(2) as pool:
            rows = list(pool.map(lambda job: ask(client, job), pair))
        yield from rows[: len(pair) if pair[0] is not pair[-1] else 1]


def pairs(jobs: Sequence[Job]) -> list[tuple[Job, Job]]:
    """Jobs two by two; one that is left over is asked beside itself."""
    return [(jobs[i], jobs[i + 1] if i + 1 < len(jobs) else jobs[i]) for i in range(0, len(jobs), 2)]


def _judge_endings(server: "Server", client: "HttpClient", jobs: Sequence[Job]) -> Iterator[Row]:
    """Cancel, followed by the shortest answer; shutdown during one that is long enough to be cut off."""
    from pocketllm.golden.entry_points.endings import check_cancel, check_shutdown

    by_length = sorted(jobs, key=lambda job: job.answer.expected.num_output_tokens)
    short, last = by_length[0], by_length[-1]
    long = next((job for job in by_length if job.answer.expected.num_output_tokens >= LONG_ENOUGH_TOKENS), last)
    path = ServedPath(short.path.entry_point, is_stream=True)
    yield Row(short.case.name, path, "cancel", check_cancel(client, short.case, short.answer))
    path = ServedPath(long.path.entry_point, is_stream=True)
    yield Row(long.case.name, path, "shutdown", check_shutdown(server, client, long.case, long.answer))


# -- the gate of a benchmark -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GateResult:
    """One quick look before anything is timed: fast and wrong is not fast."""

    outcome: Outcome
    detail: str


def gate(engine: "Engine", fixtures: Path | None = None) -> GateResult:
    """Ask a loaded engine for its shortest recorded case."""
    from pocketllm.golden.entry_points.in_process import InProcess, load
    from pocketllm.golden.subject import subject_of

    subject = subject_of(engine)
    with load(subject) as llm:
        return _gate(subject, InProcess(llm), ("in_process",), fixtures)


def gate_url(
    url: str,
    model: str,
    options: "EngineOptions | None" = None,
    fixtures: Path | None = None,
    api_key: str | None = None,
) -> GateResult:
    """Ask a server, which calls it `model`, for the shortest recorded case of `options.model` (or the default one)."""
    from pocketllm.engine.options import resolve_options
    from pocketllm.golden.entry_points.http import HttpClient
    from pocketllm.golden.subject import open_subject

    client = HttpClient(url, model, api_key)
    try:
        return _gate(open_subject(options or resolve_options({})), client, HTTP_ENTRY_POINTS, fixtures)
    finally:
        client.close()


def _gate(subject: "Subject", client: "Client", entry_points: Sequence[str], fixtures: Path | None) -> GateResult:
    folder = FixtureFolder((fixtures or default_root()) / subject.name)
    jobs, reasons = [], []
    for case in folder.cases():
        answer, reason = folder.answer(case, subject.hard_key)
        path = next((path for path in case.paths if path.entry_point in entry_points), None)
        if answer is None:
            reasons.append(reason)
        elif path is not None:
            jobs.append(Job(case, answer, ServedPath(path.entry_point)))
    if not jobs:
        reason = reasons[0] if reasons else f"no case for {subject.name} in {folder.label()}"
        return GateResult(Unrecorded(reason), f"tokens not compared: {reason}")
    row = ask(client, min(jobs, key=lambda job: len(job.case.prompt_token_ids) + len(job.answer.expected.token_ids)))
    detail = describe(row.outcome)
    return GateResult(row.outcome, f"golden {row.case}: {row.outcome.word}" + (f" ({detail})" if detail else ""))
