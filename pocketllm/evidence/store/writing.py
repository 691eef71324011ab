"""A record being made: every row durable in a journal, then one Parquet file, all or nothing."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pocketllm.errors import RecordError
from pocketllm.evidence import provenance, schema
from pocketllm.evidence.journal import SUFFIX, Journal, read_journal
from pocketllm.evidence.provenance.redaction import scrub, scrub_text
from pocketllm.evidence.store.folders import prove_writable
from pocketllm.evidence.store.signals import signals_held

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
FREE_TEXT = ("error", "detail")
"""Row columns that hold other people's sentences, and so may name a path or a host."""


def new_ulid() -> str:
    """26 Crockford base32 letters: 48 bits of milliseconds, 80 random bits; later ones sort after earlier ones."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return "".join(CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def utc_now() -> str:
    """The time as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RecordWriter:
    """A record being made. `append` is durable when it returns; `finish` turns the journal into the Parquet file.

    The document's provenance keys (tool, argv, code, machine) are collected here unless given. Paths, credentials and
    host names are taken out of document and rows on the way in. As a context manager: an exception or Ctrl-C finishes
    the record with `complete: false`; an exit without either finishes it as complete.
    """

    def __init__(self, kind: str, document: Mapping[str, Any], directory: Path) -> None:
        self.kind = schema.check_kind(kind)
        taken = [key for key in schema.WRITER_KEYS if key in document]
        if taken:
            raise RecordError(f"document key {taken[0]!r} is the writer's own")
        if missing := schema.missing_keys(kind, document, schema.START_KEYS):
            raise RecordError(f"a {kind} document needs {', '.join(missing)}")
        self.run_id = new_ulid()
        self.directory = directory
        self.path: Path | None = None
        facts = {} if {"tool", "argv", "code", "machine"} <= set(document) else provenance.collect()
        self.document: dict[str, Any] = {
            "schema": schema.SCHEMA_VERSION,
            "kind": kind,
            "run_id": self.run_id,
            "started_utc": utc_now(),
            "finished_utc": None,
            "complete": False,
            **scrub(schema.plain({**facts, **document})),
        }
        prove_writable(directory)
        self._journal = Journal(directory / (self.run_id + SUFFIX), self.document)

    def append(self, rows: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Check a row, or rows, and put them on disk; RecordError for an unknown column or a wrong type."""
        if self.path is not None:
            raise RecordError(f"record {self.run_id} is finished: it is never edited, only superseded")
        checked = schema.check_rows(self.kind, [rows] if isinstance(rows, Mapping) else rows)
        own = {"run_id": self.run_id, "schema": schema.SCHEMA_VERSION, "kind": self.kind}
        for row in checked:
            row.update(own)
            for name in FREE_TEXT:
                if row.get(name):
                    row[name] = scrub_text(row[name])
        if checked:
            self._journal.write(checked)

    def finish(self, extra_document: Mapping[str, Any] | None = None, *, complete: bool = True) -> Path:
        """Write the Parquet file and remove the journal; returns its path, the same one when called again.

        A document that lacks a key which a complete record must have is saved as incomplete, then RecordError.
        Ctrl-C and SIGTERM wait until the file is whole.
        """
        if self.path is not None:
            return self.path
        with signals_held():
            return self._finish(extra_document or {}, complete)

    def finish_with(self, ending: Callable[[], Mapping[str, Any]], *, complete: bool = True) -> tuple[Path, bool]:
        """`finish` with what `ending` makes; and whether Ctrl-C came meanwhile, which waits: the file is whole then."""
        try:
            with signals_held():
                self.finish(ending(), complete=complete)
        except KeyboardInterrupt:
            if self.path is None:
                raise
            return self.path, True
        assert self.path is not None
        return self.path, False

    def _finish(self, extra_document: Mapping[str, Any], complete: bool) -> Path:
        document = {**self.document, **scrub(schema.plain(dict(extra_document)))}
        document.update({key: self.document[key] for key in schema.WRITER_KEYS if key in self.document})
        missing = schema.missing_keys(self.kind, document, schema.END_KEYS)
        document["complete"] = complete and not missing
        document["finished_utc"] = utc_now()
        self._journal.close()
        _, rows = read_journal(self._journal.path)
        document["rows_sha256"] = schema.rows_sha256(rows)
        path = self.directory / f"{self.run_id}.parquet"
        try:
            write_parquet(path, self.kind, document, rows)
        except RecordError as error:
            raise RecordError(f"{error}; what was measured is in {self._journal.path.name}") from error
        self._journal.path.unlink(missing_ok=True)
        self.document, self.path = document, path
        if complete and missing:
            raise RecordError(f"a complete {self.kind} document needs {', '.join(missing)}; saved as incomplete")
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.finish({"ended_by": kind.__name__}, complete=False)


def write_parquet(path: Path, kind: str, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows and document to a new file, all or nothing: a reader never sees half of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    metadata = {schema.DOCUMENT_KEY: text, schema.DIGEST_KEY: schema.document_sha256(text)}
    declared = schema.arrow_schema(kind).with_metadata(metadata)
    partial = path.with_suffix(".partial")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=declared), partial, compression="zstd")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        # the system's own words: pyarrow's are about its buffers
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RecordError(f"cannot write {path}: {reason}") from error
