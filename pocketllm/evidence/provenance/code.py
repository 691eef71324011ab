"""Which code made a record: commit, difference from it, package versions."""

import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    *("numpy", "torch", "triton", "gguf", "tokenizers", "jinja2", "fastapi", "uvicorn"),
    *("pydantic", "httpx", "pyarrow", "pandas", "scipy", "psutil", "transformers"),
)
"""Distributions whose version can change what is measured or proved."""

WITHOUT_EFFECT = (
    *(f":(exclude,icase){name}" for name in ("records", "docs", "*.md", "*.rst", "LICENSE*", ".github")),
    # tests alone: what else lies there makes parity records
    ":(exclude,glob)tests/**/test_*.py",
)
"""What of a checkout changes no answer and no time, as git excludes it: records, prose and tests."""


def code_facts(package: Path | None = None) -> dict[str, Any]:
    """Commit of a package's source tree (the running one), whether it differs from it, and a digest of the difference.

    Empty when the package does not lie in a git checkout that tracks it. WITHOUT_EFFECT does not count as a difference.
    """
    package = package or Path(__file__).resolve().parents[2]
    if git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}
    commit = git(package, "rev-parse", "HEAD")
    top = git(package, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return {}
    facts: dict[str, Any] = {"commit": commit.decode().strip()}
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    difference = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--", ".", *WITHOUT_EFFECT)
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", *WITHOUT_EFFECT)
    if difference is None or untracked is None:
        return facts
    facts["dirty"] = bool(difference or untracked)
    if facts["dirty"]:
        facts["diff_sha256"] = difference_digest(root, difference, untracked)
    return facts


def difference_digest(root: Path, difference: bytes, untracked: bytes) -> str:
    """Digest of a tracked difference plus the names and contents of untracked files."""
    digest = hashlib.sha256(difference)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        digest.update(b"\0" + name + b"\0")
        try:
            with (root / os.fsdecode(name)).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()


def git(folder: Path, *words: str, stdin: bytes | None = None) -> bytes | None:
    """Output of a read-only git command, or None when it cannot be had."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            input=stdin,
            capture_output=True,
            timeout=20,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of distributions, from their metadata: nothing is imported."""

    def versions() -> Iterator[tuple[str, str]]:
        for name in names:
            try:
                yield name, importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue

    return dict(versions())
