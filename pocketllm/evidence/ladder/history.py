"""What git knows of the code since a proof: which files differ, by which commits, and how they read at each."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten

from pocketllm.evidence.provenance.code import git

PACKAGE = "pocketllm"
SUBJECT = 60
"""Letters of a commit's subject that are told."""
RECORD, FIELD = "\x1e", "\x1f"
"""Control characters between the commits of a log and between their fields."""


@dataclass(frozen=True)
class Commit:
    """One commit of the history since a proof."""

    sha: str
    subject: str
    files: frozenset[str]

    def __str__(self) -> str:
        return f"{self.sha[:10]} ({shorten(self.subject, SUBJECT, placeholder='…')})"


class History:
    """The checkout that holds a folder; every answer is None where git cannot tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts: dict[tuple[str, str], bytes | None] = {}

    @cached_property
    def root(self) -> Path | None:
        """Top of the checkout."""
        top = git(self.folder, "rev-parse", "--show-toplevel")
        return None if top is None else Path(os.fsdecode(top.rstrip(b"\n")))

    def changed(self, commit: str) -> Mapping[str, str] | None:
        """Package files that differ between a commit and the working tree, each with git's letter for how."""
        if self.root is None or not commit.isalnum():
            return None
        words = ("diff", "--name-status", "-z", "--no-renames", commit, "--", PACKAGE)
        answer = git(self.root, *words)
        if answer is None:
            return None
        fields = [os.fsdecode(field) for field in answer.split(b"\0") if field]
        return dict(zip(fields[1::2], fields[::2], strict=True))

    def commits_since(self, commit: str, files: Iterable[str]) -> list[Commit]:
        """Commits after one that touched any of these files, the first first."""
        if self.root is None:
            return []
        form = f"--format={RECORD}%H{FIELD}%s{FIELD}"
        words = ("-c", "core.quotePath=false", "log", "--reverse", "--no-renames", "--name-only", form)
        answer = git(self.root, *words, f"{commit}..HEAD", "--", *files)
        entries = (answer or b"").decode("utf-8", "replace").split(RECORD)[1:]
        return [
            Commit(sha, subject, frozenset(names.split("\n")) - {""})
            for sha, subject, names in (entry.split(FIELD) for entry in entries)
        ]

    def now(self, file: str) -> bytes | None:
        """A file as it lies in the working tree."""
        try:
            return None if self.root is None else (self.root / file).read_bytes()
        except OSError:
            return None

    def at(self, commit: str, files: Iterable[str]) -> Mapping[str, bytes | None]:
        """Files as a commit has them; None for one that it has not."""
        wanted = [file for file in files if (commit, file) not in self.texts]
        if wanted and self.root is not None:
            asked = "".join(f"{commit}:{file}\n" for file in wanted).encode()
            answer = git(self.root, "cat-file", "--batch", stdin=asked) or b""
            for file in wanted:
                head, _, rest = answer.partition(b"\n")
                size = int(head.split()[2]) if head.count(b" ") == 2 and b" blob " in head else None
                self.texts[commit, file] = None if size is None else rest[:size]
                answer = rest if size is None else rest[size + 1 :]
        return {file: self.texts.get((commit, file)) for file in files}
