"""Another checkout of this project as an arm: its code, the interpreter that runs it, and what git says of it."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.errors import OptionError

VENVS = (".venv", "venv")


@dataclass(frozen=True)
class Checkout:
    """A folder that holds the package, and the Python to run it with."""

    root: Path
    python: str

    @classmethod
    def at(cls, arm: str, path: str) -> "Checkout":
        """The checkout that an arm names; OptionError when the folder holds no pocketllm.

        Its own virtual environment runs it where there is one (.venv or venv), else the interpreter that runs this.
        """
        root = Path(os.path.expanduser(path)).resolve()  # pathlib's own raises where there is no such home
        if not (root / "pocketllm" / "__init__.py").is_file():
            raise OptionError(
                f"--arms {arm}: path={path!r} is no checkout of pocketllm: it has no pocketllm/__init__.py"
            )
        own = [root / name / "bin" / "python" for name in VENVS]
        found = next((python for python in own if os.access(python, os.X_OK)), None)
        return cls(root, str(found) if found else sys.executable)

    @classmethod
    def ours(cls) -> "Checkout":
        """The code that runs now."""
        return cls(Path(__file__).resolve().parents[3], sys.executable)

    def command(self, *words: str) -> list[str]:
        """`pocketllm WORDS` of this checkout, as an argument list."""
        from pocketllm.golden.served_path import PROGRAM_AT

        return [self.python, "-c", PROGRAM_AT, str(self.root), *words]

    def code(self) -> Mapping[str, Any]:
        """Commit, whether it is dirty and a digest of the difference, as git says now; empty without git."""
        from pocketllm.evidence.provenance.code import code_facts

        return code_facts(self.root / "pocketllm")

    def package_sha256(self) -> str:
        """Digest of every file of the package, built libraries included: what runs, whatever git says of it."""
        digest = hashlib.sha256()
        package = self.root / "pocketllm"
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"\0{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    def identity(self) -> str:
        """Digest of the package and of the interpreter that runs it."""
        return hashlib.sha256(f"{self.package_sha256()} {self.python}".encode()).hexdigest()
