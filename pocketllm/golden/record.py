"""Record proposes, a person accepts: new cases and answers are written as `*.pending`, and `accept` turns them over.

A recording runs in this process: three times the same request, with the logprobs that verification needs later.
"""

import math
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RecordError
from pocketllm.golden.fields import Fields
from pocketllm.golden.fixture import (
    TOP_LOGPROBS,
    Answer,
    Case,
    Expected,
    Position,
    check_paths,
    parse_messages,
    parse_path,
    parse_sampling,
)
from pocketllm.golden.fixture_files import PENDING, FixtureFolder, check_name
from pocketllm.golden.subject import Subject, text_sha256

if TYPE_CHECKING:
    from pocketllm.engine.llm import LLM

REPEATS = 3
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
            "smallest_margin": self.answer.smallest_margin,
            "bit_identical": self.answer.is_bit_identical,
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
) -> list[Proposal]:
    """Record requests on one loaded engine and write them as pending; RecordError where three repeats disagree."""
    from pocketllm.evidence.provenance.code import code_facts
    from pocketllm.golden.entry_points.in_process import load

    code = code_facts()
    provenance = {"command": shlex.join(command), "commit": code.get("commit"), "dirty": code.get("dirty")}
    proposals = []
    with load(subject) as llm:
        for asked in requests:
            case, answer = record_case(llm, subject, asked, provenance)
            files = [folder.write_answer(answer)]
            if case.name not in folder.names() or folder.case(case.name) != case:
                files.insert(0, folder.write_case(case))
            proposals.append(Proposal(case, answer, tuple(files)))
            on_proposal(proposals[-1])
    return proposals


def record_case(llm: "LLM", subject: Subject, asked: Case, provenance: Mapping[str, Any]) -> tuple[Case, Answer]:
    """Ask three times; the case with its prompt ids, and the answer with its logprobs."""
    from pocketllm.evidence.store import utc_now
    from pocketllm.golden.entry_points.in_process import generate

    results = [generate(llm, asked, logprobs=TOP_LOGPROBS) for _ in range(REPEATS)]
    first = results[0]
    for other in results[1:]:
        if (other.token_ids, other.text) != (first.token_ids, first.text):
            raise RecordError(f"case {asked.name}: {REPEATS} repeats gave different tokens: it cannot be a golden")
    rendered = render_prompt(llm, asked)
    case = replace(
        asked,
        prompt_token_ids=tuple(first.prompt_token_ids),
        rendered_sha256=text_sha256(rendered),
        template_sha256=subject.model["template_sha256"] if asked.kind == "chat" else None,
    )
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
        positions=tuple(position(entry) for entry in first.logprobs),
        repeats=REPEATS,
        is_bit_identical=all(other.logprobs == first.logprobs for other in results[1:]),
        soft=subject.soft,
        provenance={**provenance, "recorded_utc": utc_now()},
    )
    return case, answer


def render_prompt(llm: "LLM", case: Case) -> str:
    """The text that is tokenized: the rendered template, or the prompt itself."""
    if case.kind == "completion":
        return case.prompt
    template = llm.engine.chat_template
    assert template is not None, "the engine has just answered a chat"
    return str(template.render([dict(message) for message in case.messages], add_generation_prompt=True))


def position(entry: Any) -> Position:
    """TokenLogprobs as a fixture keeps them: five digits are far below what separates two tokens."""
    logprobs = [round(float(value), DIGITS) for value in entry.top_logprobs]
    finite = [value for value in logprobs if math.isfinite(value)]
    return Position(
        logprob=round(float(entry.chosen), DIGITS),
        margin=round(finite[0] - finite[1], DIGITS) if len(finite) > 1 else 0.0,
        top_ids=tuple(int(value) for value in entry.top_ids[: len(finite)]),
        top_logprobs=tuple(finite),
    )


# -- accepting ---------------------------------------------------------------------------------------------------------
def accept(subject: Subject, folder: FixtureFolder, names: Sequence[str], reason: str, is_ci: bool) -> list[Path]:
    """Turn proposals into accepted fixtures; returns the files. The commit that follows is the reviewer's.

    RecordError under CI, without a reason, with a dirty tree (records/ apart), for a proposal that was made by other
    code or under another hard key, and where nothing is proposed.
    """
    if is_ci:
        raise RecordError("CI is set: a person accepts goldens, in a commit that can be reviewed")
    if not reason.strip():
        raise RecordError("--reason is empty: say why this answer is right, the next reader will want to know")
    if not names:
        raise RecordError(f"nothing is proposed in {folder.label()}: `pocketllm golden record` proposes")
    commit, changed = tree_state(folder.path)
    if changed:
        raise RecordError(
            f"the tree is dirty ({changed[0]}, {len(changed)} in all): commit the code that made the answer"
        )
    checked = [_check(subject, folder, name, commit) for name in names]
    return [
        file for name, answer in zip(names, checked, strict=True) for file in _turn_over(folder, name, answer, reason)
    ]


def _check(subject: Subject, folder: FixtureFolder, name: str, commit: str | None) -> Answer:
    """The pending answer of a case, or the reason why it cannot be accepted here and now."""
    answer = folder.pending_answer(name, subject.hard_key)
    if answer is None:
        pending = ", ".join(folder.pending_names()) or "nothing"
        raise RecordError(
            f"nothing is proposed for case {name!r} on {subject.hard_key.label} in {folder.label()}; pending: {pending}"
        )
    differences = answer.hard_key.differences(subject.hard_key)
    if differences:
        raise RecordError(f"case {name}: recorded under another hard key ({'; '.join(differences)}): record it here")
    made_by = answer.provenance.get("commit")
    if answer.provenance.get("dirty"):
        raise RecordError(f"case {name}: recorded from a dirty tree: commit the code, then record it again")
    if commit and made_by and made_by != commit:
        raise RecordError(f"case {name}: recorded at commit {made_by[:10]}, this is {commit[:10]}: record it again")
    case = folder.pending_case(name) or folder.case(name)
    if case.request_sha256 != answer.request_sha256:
        raise RecordError(f"case {name}: the request was changed after it was recorded: record it again")
    return answer


def _turn_over(folder: FixtureFolder, name: str, answer: Answer, reason: str) -> list[Path]:
    """Write the reason into the answer and take `.pending` off both files."""
    files = []
    proposed = folder.write_answer(replace(answer, provenance={**answer.provenance, "reason": reason.strip()}))
    for pending in (folder.path / f"{name}.json{PENDING}", proposed):
        if pending.is_file():
            files.append(pending.with_name(pending.name.removesuffix(PENDING)))
            os.replace(pending, files[-1])
    return files


def tree_state(folder: Path) -> tuple[str | None, list[str]]:
    """Commit and changed files of the checkout around `folder`, `records/` apart; (None, []) outside a checkout.

    RecordError when git cannot tell: a tree that may be dirty is not clean.
    """
    from pocketllm.evidence.provenance.code import git

    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    top = git(place, "rev-parse", "--show-toplevel")
    if top is None:
        return None, []
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    status = git(root, "status", "--porcelain", "--", ".", ":(exclude)records")
    if status is None:
        raise RecordError("git does not tell whether the tree is clean: see what `git status` says, then accept again")
    commit = git(root, "rev-parse", "HEAD")
    return commit.decode().strip() if commit else None, [os.fsdecode(line[3:]) for line in status.splitlines()]
