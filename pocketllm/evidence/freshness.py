"""How old a proof is, in changes of the code it spoke of: current, recent, stale, or unknown.

current   nothing under `pocketllm/` has changed since
recent    something has, but not the family, the backends or the weights reader
stale     one of those has
unknown   a proof names no commit, was made from uncommitted changes, or its commit is not in this checkout
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pocketllm.evidence.provenance.code import git

CURRENT, RECENT, STALE, UNKNOWN = "current", "recent", "stale", "unknown"
ENGINE = "pocketllm/engine/"


def freshness_of(architecture: str, codes: Sequence[Mapping[str, Any]], records: Path) -> str:
    """The worst freshness among proofs' `code` facts, judged in the checkout that holds the records folder."""
    if not codes or any(not code.get("commit") or code.get("dirty") is not False for code in codes):
        return UNKNOWN
    changed: set[str] = set()
    for commit in sorted({str(code["commit"]) for code in codes}):
        files = changed_since(records, commit)
        if files is None:
            return UNKNOWN
        changed.update(files)
    return judge(architecture, changed)


def judge(architecture: str, changed: Iterable[str]) -> str:
    """Freshness of a family's proof from the package files that have changed since; pure."""
    family = f"{ENGINE}models/families/{architecture.replace('-', '_')}.py"
    bound = (family, f"{ENGINE}models/blocks.py", f"{ENGINE}backends/", f"{ENGINE}weights/")
    files = list(changed)
    if any(file.startswith(bound) for file in files):
        return STALE
    return RECENT if files else CURRENT


def changed_since(records: Path, commit: str) -> list[str] | None:
    """Package files that differ between a commit and the working tree; None when git cannot tell."""
    top = git(records, "rev-parse", "--show-toplevel")
    if top is None or not commit.isalnum():
        return None
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    names = git(root, "diff", "--name-only", "-z", "--no-renames", commit, "--", "pocketllm")
    return None if names is None else [os.fsdecode(name) for name in names.split(b"\0") if name]
