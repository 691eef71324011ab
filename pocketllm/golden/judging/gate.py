"""The gate of a benchmark: one quick look before anything is timed, because fast and wrong is not fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pocketllm.golden.compare import Outcome, Unrecorded
from pocketllm.golden.files.folder import FixtureFolder, default_root
from pocketllm.golden.fixture import HTTP_ENTRY_POINTS, ServedPath
from pocketllm.golden.judging.judge import Job, ask
from pocketllm.golden.judging.words import describe

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine
    from pocketllm.engine.options import EngineOptions
    from pocketllm.golden.entry_points import Client
    from pocketllm.golden.subject import Subject


@dataclass(frozen=True)
class GateResult:
    """What the shortest recorded case says."""

    outcome: Outcome
    detail: str


def gate(engine: "Engine", fixtures: Path | None = None) -> GateResult:
    """Ask a loaded engine for its shortest recorded case."""
    from pocketllm.golden.entry_points.in_process import InProcess, load
    from pocketllm.golden.subject import subject_of

    subject = subject_of(engine)
    with load(subject) as llm:
        return ask_shortest(subject, InProcess(llm), ("in_process",), fixtures)


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
        return ask_shortest(open_subject(options or resolve_options({})), client, HTTP_ENTRY_POINTS, fixtures)
    finally:
        client.close()


def ask_shortest(
    subject: "Subject", client: "Client", entry_points: Sequence[str], fixtures: Path | None = None
) -> GateResult:
    """Ask an open entry point for the recorded case with the fewest tokens; Unrecorded says why there is none."""
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
