"""Goldens of a tiny checkpoint for tests: record with a sound engine, then verify with whatever engine a test has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pocketllm.engine.llm import LLM
from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.options import EngineOptions
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.judging.judge import Row
from pocketllm.golden.recording.accept import accept
from pocketllm.golden.recording.record import record, request
from pocketllm.golden.subject import subject_of
from pocketllm.golden.verify import Report, VerifyOptions, verify_subject
from tests.served.conftest import Served

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def options(path: Path, **more: Any) -> EngineOptions:
    return EngineOptions(model=str(path), **{"backend": "reference", "threads": 1, **more})


@contextmanager
def opened(path: Path, **more: Any) -> Iterator[Engine]:
    with load_engine(options(path, **more)) as engine:
        yield engine


def record_cases(engine: Engine, root: Path, cases: Mapping[str, Mapping[str, Any]]) -> FixtureFolder:
    """Record and accept cases; `root` lies outside any checkout, so that no tree is asked whether it is clean."""
    subject = subject_of(engine)
    folder = FixtureFolder(root / subject.name)
    asked = [request(name, {"purpose": "a test", **table}, "a test") for name, table in cases.items()]
    for proposal in record(subject, folder, asked, ["pocketllm", "golden", "record"], record_dir=root / "backing"):
        # made in a dirty tree while pocketllm is being worked on: what is tested here is the path, not the tree
        made_by = {**proposal.answer.provenance, "commit": None, "dirty": False}
        folder.write_answer(replace(proposal.answer, provenance=made_by))
    accept(subject, folder, folder.pending_names(), "a test", is_ci=False)
    return folder


def verified(engine: Engine, root: Path, *entry_points: str, **more: Any) -> Report:
    """Verify with a loaded engine, in this process alone."""
    found = VerifyOptions(
        engine.options,
        fixtures=root,
        entry_points=entry_points or ("in_process",),
        record_dir=root.parent / "runs",
        **more,
    )
    return verify_subject(subject_of(engine), found)


def verified_over_http(engine: Engine, root: Path, **more: Any) -> Report:
    """Verify a server over a loaded engine, in a thread of this process; the engine is of no use afterwards."""
    server = Served(engine)
    try:
        found = VerifyOptions(engine.options, fixtures=root, url=server.url, record_dir=root.parent / "runs", **more)
        return verify_subject(subject_of(engine), found)
    finally:
        server.stop()


def rows(report: Report, case: str = "", check: str = "tokens") -> list[Row]:
    return [row for row in report.rows if case in ("", row.case) and row.check == check]


def words(report: Report) -> dict[str, str]:
    """Outcomes by what was asked."""
    return {f"{row.case} {row.path} {row.check}": row.outcome.word for row in report.rows}


def stop_string(engine: Engine, prompt: str, max_tokens: int) -> str:
    """A text that two neighboring tokens of the answer make together, and that is nowhere whole before them."""
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams

    # no `with`: the engine is still needed
    [result] = LLM.from_engine(engine).generate(prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))
    decode, ids = engine.tokenizer.decode, result.token_ids
    for count in range(1, len(ids)):
        before, after = decode(ids[:count], continues=True), decode(ids[: count + 1], continues=True)
        stop = before[-2:] + after[len(before) :][:2]
        is_plain = stop.isascii() and stop.isprintable() and len(stop) > 2 and after.startswith(before)
        if is_plain and after.find(stop) < len(before) < after.find(stop) + len(stop):
            return stop
    raise AssertionError(f"no stop string in {result.text!r}")
