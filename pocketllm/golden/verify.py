"""Verify: ask every selected case through every entry point it names, compare, and write one run record.

Verify only reads fixtures. Outcomes are types (see `compare`); absence never scores as a pass.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pocketllm.errors import OptionError
from pocketllm.golden.compare import Diverged, Drift, NotJudged, Outcome, Regression, Tie, Unrecorded, exit_code
from pocketllm.golden.entry_points.http import unreachable
from pocketllm.golden.files.folder import FixtureFolder, StaleFile, default_root
from pocketllm.golden.fixture import ENTRY_POINTS, HTTP_ENTRY_POINTS, MAX_CONCURRENCY, Case, ServedPath
from pocketllm.golden.judging.judge import Row, ServerAt, judge
from pocketllm.golden.judging.mutations import Mutation
from pocketllm.golden.judging.words import describe

if TYPE_CHECKING:
    from pocketllm.engine.options import EngineOptions
    from pocketllm.golden.subject import Subject

Unreferenced = Literal["warn", "reject"]


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
    peer: str | None = None
    """Name of the other engine at `url`: it is held to its own recorded answers, not to this machine's."""
    concurrency: int | None = None
    """Instead of what the paths say: so many requests at a time over HTTP."""
    require: bool = False
    strict_ties: bool = False
    unreferenced: Unreferenced = "warn"
    """What a fixture file that nothing refers to does: it is told of, or ends the run with 5."""
    mutate: Mutation | None = None
    """Change one thing of a copy of each case: every row must come out red."""
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
        if self.url is None and self.peer is not None:
            raise OptionError(f"--engine {self.peer!r} goes with --url: it names the engine of that server")
        local = [name for name in self.entry_points if name not in HTTP_ENTRY_POINTS]
        if self.url and local:
            raise OptionError(f"--url is asked over HTTP only: {local[0]} runs in this machine's own engine")
        if self.concurrency is not None and not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise OptionError(f"--concurrency {self.concurrency} must be 1 to {MAX_CONCURRENCY}")

    @property
    def writes_record(self) -> bool:
        """A mutated run proves nothing about the model; in CI a record is written only where one was asked for."""
        return self.mutate is None and (self.record_dir is not None or not is_ci())

    @property
    def server(self) -> ServerAt | None:
        """The server that is asked instead of one of our own."""
        return None if self.url is None else ServerAt(self.url, self.api_key, self.served_model)


@dataclass(frozen=True)
class Report:
    """All rows of one verification, and what they add up to."""

    subject: "Subject"
    fixtures: FixtureFolder
    rows: tuple[Row, ...]
    exit_code: int
    stale: tuple[StaleFile, ...] = ()
    record: Path | None = None
    mutate: Mutation | None = None
    notes: tuple[str, ...] = ()

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the rows, then of the files that nothing refers to."""
        return [*(row.outcome for row in self.rows), *(file.outcome for file in self.stale)]


def is_ci() -> bool:
    """Whether the environment says that no person is watching."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def verify(
    options: VerifyOptions,
    on_row: Callable[[Row], None] = lambda row: None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run a verification; `on_row` sees each row as soon as it is judged, `progress` what is fetched before.

    Raises PocketLLMError for what cannot be run at all: no such model, a broken fixture, an unwritable record folder.
    """
    from pocketllm.golden.subject import open_subject

    return verify_subject(open_subject(options.engine, options.peer, progress), options, on_row)


def verify_subject(
    subject: "Subject", options: VerifyOptions, on_row: Callable[[Row], None] = lambda row: None
) -> Report:
    """`verify` for a checkpoint that is opened already."""
    folder = FixtureFolder(options.fixtures / subject.name)
    cases = [replace(case, paths=selected_paths(case, options)) for case in folder.cases(options.cases)]
    stale = tuple(folder.stale(options.cases))
    absent = unreachable(options.url) if options.url else None
    with ExitStack() as stack:
        record = stack.enter_context(open_record(subject, options, cases)) if options.writes_record else None
        rows = []
        judged = judge(subject, folder, cases, options.mutate, options.server)
        for row in not_judged(cases, absent) if absent else judged:
            rows.append(row)
            if record is not None:
                record.append(record_row(row, folder))
            on_row(row)
    outcomes = [*(row.outcome for row in rows), *(file.outcome for file in stale)]
    outcomes += [NotJudged(absent)] if absent else []
    return Report(
        subject=subject,
        fixtures=folder,
        rows=tuple(rows),
        exit_code=_exit_code(outcomes, options),
        stale=stale,
        record=record.path if record is not None else None,
        mutate=options.mutate,
        notes=(*([absent] if absent and not rows else []), *_notes(subject, options, folder, cases, rows)),
    )


def not_judged(cases: Sequence[Case], reason: str) -> Iterator[Row]:
    """A row for each path of each case, recorded or not, where there is nobody to ask."""
    return (Row(case.name, path, "tokens", NotJudged(reason)) for case in cases for path in case.paths)


def _exit_code(outcomes: Sequence[Outcome], options: VerifyOptions) -> int:
    """A mutated run in which something stayed green, or nothing was asked, shows no check that can fail."""
    code = exit_code(
        outcomes, options.require, strict_ties=options.strict_ties, reject_stale=options.unreferenced == "reject"
    )
    return 3 if options.mutate and (not outcomes or any(map(_is_blind, outcomes))) else code


def _is_blind(outcome: Outcome) -> bool:
    return outcome.word in ("IDENTICAL", "TIE")


def selected_paths(case: Case, options: VerifyOptions) -> tuple[ServedPath, ...]:
    """The paths of a case that were asked for, in the case's order."""
    wanted = options.entry_points or (HTTP_ENTRY_POINTS if options.url else ENTRY_POINTS)
    paths = [path for path in case.paths if path.entry_point in wanted]
    if options.concurrency is not None:
        width = options.concurrency
        paths = [replace(path, concurrency=width) if path.is_http and not path.is_warm else path for path in paths]
    return tuple(dict.fromkeys(paths))


def _notes(
    subject: "Subject", options: VerifyOptions, folder: FixtureFolder, cases: Sequence[Case], rows: Sequence[Row]
) -> Iterator[str]:
    """What a reader would otherwise take for granted."""
    if not cases:
        yield f"no case is recorded for {subject.name} in {folder.label()}: nothing was compared"
    elif not rows:
        yield "no selected case has a selected entry point: nothing was compared"
    num_absent = sum(isinstance(row.outcome, Unrecorded) for row in rows)
    if num_absent and not options.require:
        yield f"{num_absent} of {len(rows)} answers are not recorded: that is a failure with --require, as in CI"
    is_served = options.url is not None and any(row.outcome.word != "NOT JUDGED" for row in rows)
    if is_served and options.peer is None:
        yield "the hard key of a server at --url is not known: it was held to the answers recorded for this machine"
    if is_served and any(isinstance(row.outcome, Regression) and row.outcome.what == "prompt ids" for row in rows):
        yield f"is it {subject.name} that is served at --url? --model says whose answers a server is held to"
    if is_served and not any(row.check == "scored" for row in rows):
        yield "the server tells no logprobs of a prompt: drift was judged by what it says of its own tokens, if it does"
    if options.mutate:
        blind = [f"{row.case} {row.path} {row.check}" for row in rows if _is_blind(row.outcome)]
        if blind:
            yield f"not seen: the changed {options.mutate} left {', '.join(blind)} green"
        yield "no run record: a mutated run says nothing about the model"
    elif not options.writes_record:
        yield "no run record: CI is set, and --record-dir was not given"


def open_record(subject: "Subject", options: VerifyOptions, cases: Sequence[Case]) -> Any:
    """The run record of a verification, begun."""
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
            "engine": options.peer,
        },
    }
    return RecordWriter("golden", document, record_dir(options.record_dir))


def record_row(row: Row, folder: FixtureFolder) -> dict[str, Any]:
    """A row as the record has it."""
    outcome, observed = row.outcome, row.observed
    position, margin, regret = place_of(outcome)
    shift = outcome.shift if isinstance(outcome, Drift) else row.shift
    return {
        "case": row.case,
        "fixture_sha256": folder.sha256(row.case),
        "entry_point": row.path.entry_point,
        "check": row.check,
        "stream": row.path.is_stream,
        "concurrency": row.path.concurrency,
        "outcome": outcome.word,
        "position": position,
        "margin": margin,
        "regret": regret,
        "dlogprob_mean": shift.mean if shift else None,
        "dlogprob_p99": shift.p99 if shift else None,
        "n_prompt": observed.num_prompt_tokens,
        "n_cached": observed.num_cached_tokens,
        "n_out": observed.num_output_tokens,
        "detail": describe(outcome),
        "ttft_s": observed.ttft_s,
        "e2el_s": observed.e2el_s,
    }


def place_of(outcome: Outcome) -> tuple[int | None, float | None, float | None]:
    """Position, margin and regret of an outcome that has them."""
    match outcome:
        case Regression():
            return outcome.position, outcome.margin, outcome.regret
        case Tie():
            return outcome.positions[0], outcome.margin, outcome.regret
        case Diverged():
            return outcome.position, None, None
        case _:
            return None, None, None
