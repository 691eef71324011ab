"""The journal beside an unfinished record: JSON lines, each durable before the next slot begins.

First line the run document, every further line a list of rows. A process killed in the middle of a line loses that
line and nothing else.
"""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pocketllm.errors import RecordError

SUFFIX = ".journal"


class Journal:
    """An open journal; `write` returns when the line is on disk. Safe to call from several threads."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise RecordError(f"cannot begin a record in {path.parent}: {error.strerror}") from error
        try:
            self.write(document)
        except BaseException:  # ctrl-C and SIGTERM too: nobody holds it yet who could end it
            self.close()
            path.unlink(missing_ok=True)  # without its first line it is no record that anyone could read
            raise

    def write(self, value: Any) -> None:
        """Append one line and wait for the disk."""
        line = json.dumps(value) + "\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise RecordError(
                    f"cannot write {self.path}: {error.strerror}; free some space and run again"
                ) from error

    def close(self) -> None:
        """Close the file; it stays where it is."""
        with suppress(OSError):  # of a line that could not be written, and that `write` has told of
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_journal(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Document and rows of a journal, up to the first line that cannot be read; RecordError when that is the first."""
    document: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    break
                if document is None and isinstance(value, dict):
                    document = value
                elif document is not None and is_rows(value):
                    rows.extend(value)
                else:
                    break
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    if document is None or "kind" not in document:
        raise RecordError(f"{path.name} is not the journal of a run record: its first line is no run document")
    return document, rows


def is_rows(value: Any) -> bool:
    """Whether a line holds a list of rows."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)
