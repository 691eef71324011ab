"""Record proposes: new cases and answers are written as `*.pending`, and `accept` turns them over.

A recording runs in this process: three times the same request from a cold cache, with the logprobs that verification
needs later, then once more under each variation that may change without changing the hard key (see `noise`).
"""

import math
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RecordError, RequestError
from pocketllm.golden.compare import Identical, Shift, tau
from pocketllm.golden.files.document import (
    check_paths,
    noise_document,
    parse_messages,
    parse_path,
    parse_sampling,
    parse_tags,
)
from pocketllm.golden.files.fields import Fields
from pocketllm.golden.files.folder import FixtureFolder, check_name
from pocketllm.golden.fixture import TAGS, TOP_LOGPROBS, Answer, Case, Expected, Noise, Position, ServedPath
from pocketllm.golden.judging.judge import Row
from pocketllm.golden.recording.noise import Variations, open_variations
from pocketllm.golden.subject import Subject, text_sha256
from pocketllm.golden.verify import record_row

if TYPE_CHECKING:
    from pocketllm.engine.llm import LLM

REPEATS = 3
[PROBE] = TAGS
DIGITS = 5
DEFAULT_PATHS = {
    "chat": ("http_chat", "http_chat:stream", "in_process"),
    "completion": ("http_completions", "http_completions:stream", "in_process"),
}
NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Proposal:
    """What one recording proposes."""

    case: Case
    answer: Answer
    files: tuple[Path, ...]

    def as_dict(self) -> dict[str, Any]:
        """The gist, JSON-able."""
        return {
            "case": self.case.name,
            "text": self.answer.expected.text,
            "n_out": len(self.answer.expected.token_ids),
            "finish_reason": self.answer.expected.finish_reason,
            "smallest_margin": self.answer.smallest_margin if self.answer.positions else None,
            "noise": noise_document(self.answer.noise),
            "files": [str(file) for file in self.files],
        }


def choose_requests(
    folder: FixtureFolder,
    cases_file: Path | None,
    names: Sequence[str],
    *,
    chat: str | None = None,
    prompt: str | None = None,
    purpose: str | None = None,
    max_tokens: int = 32,
) -> list[Case]:
    """What to record: cases of a file, one new case, or accepted cases again; RecordError when none of it fits."""
    if cases_file is not None:
        if chat is not None or prompt is not None:
            raise RecordError("give a file of cases, or --chat, or --prompt, not two of them")
        found = read_requests(cases_file)
        unknown = sorted(set(names) - {case.name for case in found})
        if unknown:
            raise RecordError(f"{cases_file.name} has no case {unknown[0]!r}")
        return [case for case in found if not names or case.name in names]
    if chat is None and prompt is None:
        cases = folder.cases(names)
        if not cases:
            raise RecordError(
                f"no case in {folder.label()} yet: give a file of cases, or --case NAME with --chat or --prompt"
            )
        return cases
    if (chat is not None and prompt is not None) or len(names) != 1:
        raise RecordError("a new case has one name (--case NAME) and either --chat or --prompt")
    asked = {"prompt": prompt} if chat is None else {"messages": [{"role": "user", "content": chat}]}
    sampling = {"max_tokens": max_tokens, "temperature": 0.0}
    table = {"purpose": purpose or "recorded from the command line", **asked, "sampling": sampling}
    return [request(names[0], table, "--case")]


def read_requests(path: Path) -> list[Case]:
    """Cases to record, from a TOML file: a table a case, with purpose, messages or prompt, sampling and paths.

    The prompt ids are not known yet. RecordError names file and key.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}; give a TOML file of cases") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name} is not valid TOML: {error}") from error
    if not tables:
        raise RecordError(f"{path.name} holds no case: a case is a table, its name in brackets")
    return [request(name, table, path.name) for name, table in tables.items()]


def request(name: str, table: Any, where: str) -> Case:
    """A case without prompt ids, from what a person wrote."""
    check_name(name)
    if not isinstance(table, Mapping):
        raise RecordError(f"{where}: {name}: must be a table")
    kind = "chat" if "messages" in table else "completion"
    file = Fields(table, f"{where}: [{name}]")
    if "messages" in table and "prompt" in table:
        raise file.error("prompt", "excludes messages, and the case has both: keep one of them")
    case = Case(
        name=name,
        purpose=file.text("purpose"),
        kind="chat" if kind == "chat" else "completion",
        messages=parse_messages(file, optional=kind == "completion"),
        prompt=file.text("prompt") if kind == "completion" else "",
        sampling=parse_sampling(file.child("sampling", file.object("sampling"))),
        paths=tuple(
            parse_path(file, text) for text in (file.texts("paths") if "paths" in table else DEFAULT_PATHS[kind])
        ),
        template_sha256=None,
        rendered_sha256=NO_DIGEST,
        prompt_token_ids=(0,),
        tags=parse_tags(file),
    )
    check_paths(file, case)
    file.end()
    return case


def record(
    subject: Subject,
    folder: FixtureFolder,
    requests: Sequence[Case],
    command: Sequence[str],
    on_proposal: Callable[[Proposal], None] = lambda proposal: None,
    record_dir: Path | None = None,
) -> list[Proposal]:
    """Record requests on one loaded engine and write them as pending, backed by a run record that the answers name.

    RecordError where three repeats disagree, and where a margin is so small that the answer could be another.
    """
    from pocketllm.golden.entry_points.in_process import load

    proposals = []
    with begin_record(subject, requests, record_dir) as backing, load(subject) as llm:
        made_by = provenance(command, backing.run_id)
        with open_variations(subject, llm) as variations:
            for asked in requests:
                case, answer = record_case(llm, subject, asked, made_by, variations)
                proposals.append(propose(folder, case, answer))
                backing.append(backing_row(folder, proposals[-1]))
                on_proposal(proposals[-1])
    return proposals


def begin_record(subject: Subject, requests: Sequence[Case], record_dir: Path | None) -> Any:
    """The run record behind a recording: one row a case, its repeats against the first of them."""
    from pocketllm.evidence.device_class import device_class
    from pocketllm.evidence.store import RecordWriter
    from pocketllm.evidence.store import record_dir as writable_dir

    document = {
        "device_class": device_class(subject.plan.as_dict()),
        "model": dict(subject.model),
        "plan": subject.plan.as_dict(),
        "recording": {"cases": [case.name for case in requests], "repeats": REPEATS, "engine": subject.peer},
    }
    return RecordWriter("golden", document, writable_dir(record_dir))


def provenance(command: Sequence[str], run_id: str) -> dict[str, Any]:
    """Command, commit, whether the tree differs from it, and the run record."""
    from pocketllm.evidence.provenance.code import code_facts

    code = code_facts()
    return {
        "command": shlex.join(command),
        "commit": code.get("commit"),
        "dirty": code.get("dirty"),
        "record": run_id,
    }


def propose(folder: FixtureFolder, case: Case, answer: Answer) -> Proposal:
    """Write an answer, and its case where that is new or another, as pending."""
    check_margin(case, answer)
    files = [folder.write_answer(answer)]
    if case.name not in folder.names() or folder.case(case.name) != case:
        files.insert(0, folder.write_case(case))
    return Proposal(case, answer, tuple(files))


def check_margin(case: Case, answer: Answer) -> None:
    """RecordError for a greedy answer whose smallest margin is below 3 τ, unless the case is there for that."""
    least = 3 * tau(answer.noise)
    if answer.smallest_margin < least and case.is_greedy and PROBE not in case.tags:
        raise RecordError(
            f"case {case.name}: its smallest margin {answer.smallest_margin:.2g} nat is below 3 τ = {least:.2g}: take "
            f"a prompt with a clearer answer (`pocketllm golden suggest`), or tag the case {PROBE}"
        )


def backing_row(folder: FixtureFolder, proposal: Proposal) -> dict[str, Any]:
    """What a recording has measured of a case, as a row of its run record."""
    expected, noise = proposal.answer.expected, proposal.answer.noise
    entry_point = (
        "in_process" if proposal.answer.positions or expected.token_ids else proposal.case.paths[0].entry_point
    )
    floor = Shift(noise.floor.mean, noise.floor.p99)
    row = record_row(Row(proposal.case.name, ServedPath(entry_point), "tokens", Identical(), shift=floor), folder)
    counts = {"n_prompt": expected.num_prompt_tokens, "n_out": expected.num_output_tokens}
    return {**row, **counts, "margin": proposal.answer.smallest_margin if proposal.answer.positions else None}


def record_case(
    llm: "LLM", subject: Subject, asked: Case, made_by: Mapping[str, Any], variations: Variations
) -> tuple[Case, Answer]:
    """Ask three times from a cold cache, then vary; the case with its prompt ids, and the answer with its logprobs."""
    from pocketllm.evidence.store import utc_now
    from pocketllm.golden.entry_points.in_process import generate

    results = []
    for _ in range(REPEATS):
        llm.engine.loop.reset_prefix_cache()
        try:
            results.append(generate(llm, asked, logprobs=TOP_LOGPROBS))
        except RequestError as error:
            raise RecordError(f"case {asked.name}: {error}") from error
    first = results[0]
    for other in results[1:]:
        if (other.token_ids, other.text) != (first.token_ids, first.text):
            raise RecordError(f"case {asked.name}: {REPEATS} repeats gave different tokens: it cannot be a golden")
    names, floor = variations.measure(asked, first)
    case = with_prompt(subject, asked, tuple(first.prompt_token_ids))
    answer = Answer(
        case=case.name,
        request_sha256=case.request_sha256,
        hard_key=subject.hard_key,
        expected=Expected(
            token_ids=tuple(first.token_ids),
            text=first.text,
            finish_reason=first.finish_reason,
            num_prompt_tokens=first.usage.prompt_tokens,
            num_output_tokens=first.usage.completion_tokens,
        ),
        positions=tuple(position(entry.chosen, entry.top_ids, entry.top_logprobs) for entry in first.logprobs),
        noise=Noise(
            repeats=REPEATS,
            is_bit_identical=all(other.logprobs == first.logprobs for other in results[1:]),
            variations=names,
            floor=floor,
            reference=variations.reference(first),
        ),
        soft=subject.soft,
        provenance={**made_by, "recorded_utc": utc_now()},
    )
    return case, answer


def with_prompt(subject: Subject, asked: Case, token_ids: tuple[int, ...]) -> Case:
    """The case with the prompt ids it became, and the digests of its text and of the template behind it."""
    return replace(
        asked,
        prompt_token_ids=token_ids,
        rendered_sha256=text_sha256(subject.prompts.render(asked)),
        template_sha256=subject.model["template_sha256"] if asked.kind == "chat" else None,
    )


def position(chosen: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> Position:
    """One position as a fixture keeps it: five digits are far below what separates two tokens."""
    logprobs = [round(float(value), DIGITS) for value in top_logprobs]
    finite = [value for value in logprobs if math.isfinite(value)]
    return Position(
        logprob=round(float(chosen), DIGITS),
        margin=round(finite[0] - finite[1], DIGITS) if len(finite) > 1 else 0.0,
        top_ids=tuple(int(value) for value in top_ids[: len(finite)]),
        top_logprobs=tuple(finite),
    )
