"""The folders that records lie in: where new ones go, where any are looked for, and which files are there."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pocketllm.errors import RecordError
from pocketllm.evidence.journal import SUFFIX

RECORDS = "records"
LOCAL = "local"


def record_dir(given: Path | None = None) -> Path:
    """The folder that new records go to, made and proved writable now; RecordError before anything is measured.

    Without a given folder: `records/local/` of the working directory, else the user's data folder.
    """
    if given is not None:
        prove_writable(given)
        return given
    first = Path.cwd() / RECORDS / LOCAL
    try:
        prove_writable(first)
    except RecordError:
        second = user_dir()
        if second is None:
            raise
        prove_writable(second)
        return second
    return first


def user_dir() -> Path | None:
    """Records folder of the user, where the working directory cannot be written; None for one without a home."""
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pocketllm" / RECORDS
    except RuntimeError:
        return None


def search_dirs(given: Path | None = None) -> list[Path]:
    """Folders in which records are looked for: the given one alone, else the working directory's and the user's."""
    if given is not None:
        if not given.is_dir():
            raise RecordError(f"no folder {given} to read records from")
        return [given]
    return [folder for folder in (Path.cwd() / RECORDS, user_dir()) if folder and folder.is_dir()]


def prove_writable(folder: Path) -> None:
    """Make a folder and a file in it; RecordError when either is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordError(
            f"cannot write records to {folder}: {reason}; name another folder with --record-dir"
        ) from error


def record_files(dirs: Iterable[Path]) -> dict[str, Path]:
    """File of each run by id, oldest first; a kept copy wins over the local one, a Parquet file over its journal."""

    def rank(path: Path) -> tuple[bool, bool]:
        return path.suffix == SUFFIX, path.parent.name == LOCAL

    found: dict[str, Path] = {}
    for path in files_in(dirs):
        if path.stem not in found or rank(path) < rank(found[path.stem]):
            found[path.stem] = path
    return dict(sorted(found.items()))


def files_in(dirs: Iterable[Path]) -> Iterator[Path]:
    """Parquet files and journals under folders, deterministic in order."""
    for folder in dirs:
        yield from sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", SUFFIX) and path.is_file())
