"""Ask every selected case along every path it names, and judge what comes back: one row for each."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from pocketllm.errors import NotJudgedError
from pocketllm.golden.compare import (
    Identical,
    NotJudged,
    Observed,
    Outcome,
    Regression,
    Shift,
    Unrecorded,
    compare,
    drift,
    first_difference,
    shift_of,
)
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import Answer, Case, ServedPath
from pocketllm.golden.judging.mutations import Mutation, mutated
from pocketllm.golden.judging.ties import settle

if TYPE_CHECKING:
    from pocketllm.golden.entry_points import Client
    from pocketllm.golden.entry_points.http import HttpClient
    from pocketllm.golden.served_path import Server
    from pocketllm.golden.subject import Subject

Check = Literal["tokens", "scored", "cancel", "shutdown"]
LONG_ENOUGH_TOKENS = 16
"""An answer in flight when SIGTERM arrives: long beside the time a signal takes, short beside a test suite."""


@dataclass(frozen=True)
class ServerAt:
    """A server that runs already: its address, its key, and what it calls the model (None: its only one)."""

    url: str
    api_key: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Row:
    """One thing that was checked."""

    case: str
    path: ServedPath
    check: Check
    outcome: Outcome
    observed: Observed = field(default_factory=Observed)
    shift: Shift | None = None
    """Of the recorded tokens' logprobs, up to the first that differs."""


@dataclass(frozen=True)
class Job:
    """One case to be asked along one path."""

    case: Case
    answer: Answer
    path: ServedPath
    unrecorded: str = ""
    """Why the answer is not this request's: then only the prompt ids are judged."""


def judge(
    subject: "Subject",
    folder: FixtureFolder,
    cases: Sequence[Case],
    mutate: Mutation | None = None,
    server: ServerAt | None = None,
) -> Iterator[Row]:
    """Rows of all paths of these cases, one entry point after the other: two engines never share the machine."""
    jobs: list[Job] = []
    for case in cases:
        answer, reason = folder.answer(case, subject.hard_key)
        answer = answer or folder.answer_of_changed(case, subject.hard_key)
        if answer is None:
            yield from (Row(case.name, path, "tokens", Unrecorded(reason)) for path in case.paths)
        else:
            pair = mutated(subject, case, answer, mutate)
            jobs += [Job(*pair, path, reason) for path in case.paths]
    for entry_point in ("in_process", "generate"):
        yield from _judge_local(entry_point, subject, [job for job in jobs if job.path.entry_point == entry_point])
    http = [job for job in jobs if job.path.is_http]
    if http:
        yield from _judge_http(subject, http, server)


def _judge_local(entry_point: str, subject: "Subject", jobs: Sequence[Job]) -> Iterator[Row]:
    from pocketllm.golden.entry_points import open_client

    if jobs:
        with open_client(entry_point, subject) as client:
            for job in jobs:
                yield ask(client, job)
            yield from scored(client, jobs)


def ask(client: "Client", job: Job, unstreamed_text: str | None = None) -> Row:
    """Ask one case along one path and judge it."""
    try:
        if job.path.is_warm:
            client.answer(beginning(job.case))
        observed = client.answer(job.case, job.path.is_stream)
    except NotJudgedError as error:
        return Row(job.case.name, job.path, "tokens", NotJudged(str(error)))
    outcome = compare(job.case, job.answer, observed, unstreamed_text)
    if job.unrecorded and not (isinstance(outcome, Regression) and outcome.what == "prompt ids"):
        return Row(job.case.name, job.path, "tokens", Unrecorded(job.unrecorded), observed)
    outcome = settle(job.case, job.answer, observed, outcome, client.resume)
    if job.path.is_warm and isinstance(outcome, Identical):
        outcome = _cold(observed) or outcome
    return Row(job.case.name, job.path, "tokens", outcome, observed, _agreed_shift(job.answer, observed))


def beginning(case: Case) -> Case:
    """What a conversation had asked one turn earlier, or else the same request; one token of it."""
    asked = [index for index, message in enumerate(case.messages) if message["role"] == "user"]
    messages = case.messages[: asked[-2] + 1] if len(asked) > 1 else case.messages
    return replace(case, messages=messages, sampling={**case.sampling, "max_tokens": 1})


def _cold(observed: Observed) -> Outcome | None:
    """What is wrong with an answer that was to come from a warm cache."""
    if observed.num_cached_tokens is None:
        return NotJudged("the server does not say how many prompt tokens came from its cache")
    if observed.num_cached_tokens == 0:
        return Regression("cache", "no prompt token came from the prefix cache, although its beginning was just asked")
    return None


def _agreed_shift(answer: Answer, observed: Observed) -> Shift | None:
    """Of the recorded tokens that were served, from the first on."""
    if observed.token_ids is None or observed.logprobs is None:
        return None
    agreed = first_difference(answer.expected.token_ids, observed.token_ids)
    return shift_of(answer, observed.logprobs[:agreed])


def scored(client: "Client", jobs: Sequence[Job]) -> Iterator[Row]:
    """The recorded tokens of each case given to the entry point as they are: a row where it can tell their logprobs."""
    for job in {job.case.name: job for job in jobs if job.answer.positions and not job.unrecorded}.values():
        path = ServedPath(job.path.entry_point)
        try:
            logprobs = client.score(job.case.prompt_token_ids, job.answer.expected.token_ids)
        except NotJudgedError as error:
            yield Row(job.case.name, path, "scored", NotJudged(str(error)))
            continue
        if logprobs is None:
            return  # nobody here scores: what an answer says of its own tokens is judged with the answer
        found = shift_of(job.answer, logprobs)
        yield Row(job.case.name, path, "scored", drift(job.answer.noise, found) or Identical("scores"), shift=found)


def _judge_http(subject: "Subject", jobs: Sequence[Job], given: ServerAt | None) -> Iterator[Row]:
    from pocketllm.golden.entry_points.http import HttpClient, served_model
    from pocketllm.golden.served_path import launch, serve_command

    with ExitStack() as stack:
        server: Server | None = None
        try:
            if given is None:
                server = stack.enter_context(launch(serve_command(subject.engine_flags())))
                given = ServerAt(server.url)
            model = given.model or served_model(given.url, given.api_key)
        except NotJudgedError as error:
            yield from (Row(job.case.name, job.path, "tokens", NotJudged(str(error))) for job in jobs)
            return
        client = HttpClient(given.url, model, given.api_key)
        stack.callback(client.close)
        yield from _with_log(_ask_all(client, jobs), server)
        yield from _with_log(scored(client, jobs), server)
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
    """One request at a time first, then several at a time."""
    unstreamed: dict[tuple[str, str], str] = {}
    for job in sorted((job for job in jobs if job.path.concurrency == 1), key=lambda job: job.path.is_stream):
        twin = (job.case.name, job.path.entry_point)
        row = ask(client, job, unstreamed.get(twin) if job.path.is_stream else None)
        if not job.path.is_stream and row.observed.status == 200 and not isinstance(row.outcome, NotJudged):
            unstreamed[twin] = row.observed.text
        yield row
    for width in sorted({job.path.concurrency for job in jobs} - {1}):
        yield from _ask_together(client, [job for job in jobs if job.path.concurrency == width], width)


def _ask_together(client: "HttpClient", jobs: Sequence[Job], width: int) -> Iterator[Row]:
    for group in groups(jobs, width):
        with ThreadPoolExecutor(width) as pool:
            rows = list(pool.map(partial(ask, client), group))
        yield from rows[: len(set(map(id, group)))]


def groups(jobs: Sequence[Job], width: int) -> list[list[Job]]:
    """Jobs so many by so many; the last group is filled up with its last job, asked beside itself."""
    cut = [list(jobs[first : first + width]) for first in range(0, len(jobs), width)]
    return [group + group[-1:] * (width - len(group)) for group in cut]


def _judge_endings(server: "Server", client: "HttpClient", jobs: Sequence[Job]) -> Iterator[Row]:
    """Cancel, followed by the shortest answer; shutdown during one that is long enough to be cut off."""
    from pocketllm.golden.judging.endings import check_cancel, check_shutdown

    by_length = sorted(jobs, key=lambda job: job.answer.expected.num_output_tokens)
    short, last = by_length[0], by_length[-1]
    long = next((job for job in by_length if job.answer.expected.num_output_tokens >= LONG_ENOUGH_TOKENS), last)
    path = ServedPath(short.path.entry_point, is_stream=True)
    yield Row(short.case.name, path, "cancel", check_cancel(client, short.case, short.answer))
    path = ServedPath(long.path.entry_point, is_stream=True)
    yield Row(long.case.name, path, "shutdown", check_shutdown(server, client, long.case, long.answer))
