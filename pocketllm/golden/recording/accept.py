"""A person accepts: proposals take the place of accepted files, with a reason; and stale files are pruned."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pocketllm.errors import RecordError
from pocketllm.evidence.provenance import code
from pocketllm.golden.files.folder import PENDING, FixtureFolder, StaleFile
from pocketllm.golden.fixture import Answer
from pocketllm.golden.subject import Subject


def accept(subject: Subject, folder: FixtureFolder, names: Sequence[str], reason: str, is_ci: bool) -> list[Path]:
    """Turn proposals into accepted fixtures; returns the files. The commit that follows is the reviewer's.

    RecordError under CI, without a reason, beside uncommitted changes that could change an answer, for a proposal made
    by other code or under another hard key, and where nothing is proposed.
    """
    if is_ci:
        raise RecordError("CI is set: a person accepts goldens, in a commit that can be reviewed")
    if not reason.strip():
        raise RecordError("--reason is empty: say why this answer is right, the next reader will want to know")
    if not names:
        raise RecordError(f"nothing is proposed in {folder.label()}: `pocketllm golden record` proposes")
    changed = changes_around(folder.path)
    if changed:
        raise RecordError(
            f"the tree around {folder.path} is dirty: commit the code that made the answer; what counts (records, "
            f"documentation and tests do not): {named(changed)}"
        )
    commit = code.code_facts().get("commit")
    checked = [check(subject, folder, name, commit) for name in names]
    return [
        file for name, answer in zip(names, checked, strict=True) for file in _turn_over(folder, name, answer, reason)
    ]


def check(subject: Subject, folder: FixtureFolder, name: str, commit: str | None) -> Answer:
    """The pending answer of a case, or the reason why it cannot be accepted here and now.

    commit: that of the running code, which need not lie in the fixtures' repository; None where it is not known.
    """
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


def named(files: Sequence[str], most: int = 4) -> str:
    """Files by name, the first of them where there are many.

    >>> named(["a.py", "b.py", "c.py"], most=2)
    'a.py, b.py and 1 more'
    """
    return ", ".join(files[:most]) + (f" and {len(files) - most} more" if len(files) > most else "")


def changes_around(folder: Path) -> list[str]:
    """Changed files of the checkout around `folder` that could change an answer; none outside a checkout.

    RecordError when git cannot tell: a tree that may be dirty is not clean.
    """
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    top = code.git(place, "rev-parse", "--show-toplevel")
    if top is None:
        return []
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    status = code.git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", *code.WITHOUT_EFFECT)
    if status is None:
        raise RecordError("git does not tell whether the tree is clean: see what `git status` says, then accept again")
    return [os.fsdecode(line[3:]) for line in status.splitlines()]


def reject(subject: Subject, folder: FixtureFolder, name: str) -> list[Path]:
    """Delete what is proposed of a case for this hard key's device, the proposed case too; returns the files."""
    files = [folder.path / f"{name}.{subject.hard_key.label}.json{PENDING}"]
    if not any(file not in files for file in folder.path.glob(f"{name}.*.json{PENDING}")):
        files.append(folder.path / f"{name}.json{PENDING}")
    found = [file for file in files if file.is_file()]
    for file in found:
        file.unlink()
    return found


def prune(files: Sequence[StaleFile], is_ci: bool) -> None:
    """Delete fixture files that nothing refers to; RecordError under CI."""
    if is_ci:
        raise RecordError("CI is set: a person prunes goldens, in a commit that can be reviewed")
    for file in files:
        file.path.unlink()
