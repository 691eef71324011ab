"""Where run records live: one immutable Parquet file a run, which explains itself through the document inside it.

    with RecordWriter("bench", document, record_dir(None)) as record:
        for slot in slots:
            record.append(measure(slot))        # durable at once: a crash keeps what was paid for
        path = record.finish({"results": ..., "checks": ...})

New runs land in `records/local/` of the working directory (or the user's data folder where that cannot be written);
`keep` promotes one to `records/<kind>/year=YYYY/`, where it is reviewed and committed like code.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pocketllm.errors import RecordError
from pocketllm.evidence import provenance, schema
from pocketllm.evidence.columns import COLUMNS
from pocketllm.evidence.journal import SUFFIX, Journal, read_journal
from pocketllm.evidence.provenance.redaction import scrub, scrub_text

if TYPE_CHECKING:
    import pandas as pd

RECORDS = "records"
LOCAL = "local"
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
FREE_TEXT = ("error", "detail")
"""Row columns that hold other people's sentences, and so may name a path or a host."""


def new_ulid() -> str:
    """26 Crockford base32 letters: 48 bits of milliseconds, 80 random bits; later ones sort after earlier ones."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return "".join(CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def utc_now() -> str:
    """The time as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- folders -----------------------------------------------------------------------------------------------------------
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


# -- writing -----------------------------------------------------------------------------------------------------------
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
        """
        if self.path is not None:
            return self.path
        document = {**self.document, **scrub(schema.plain(dict(extra_document or {})))}
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


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Record:
    """One run: its document, and its rows when asked for."""

    path: Path
    document: dict[str, Any]
    metadata: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    """Key-value metadata of the Parquet file."""

    @property
    def run_id(self) -> str:
        return str(self.document.get("run_id", self.path.stem))

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def complete(self) -> bool:
        """Whether the run came to its end; false for a journal whose process was killed or still runs."""
        return self.document.get("complete") is True and self.path.suffix != SUFFIX

    @cached_property
    def row_dicts(self) -> list[dict[str, Any]]:
        """Rows as dictionaries with every column of the declared schema, and any that a later version added."""
        if self.path.suffix == SUFFIX:
            return read_journal(self.path)[1]
        columns = dict.fromkeys(COLUMNS[self.kind])
        try:
            return [{**columns, **row} for row in read_table(self.path).to_pylist()]
        except OverflowError as error:  # a date that Python has not
            raise RecordError(f"{self.path.name} is a broken Parquet file: {error}") from error

    @cached_property
    def rows(self) -> "pd.DataFrame":
        """Rows as a pandas frame with the same columns as row_dicts."""
        return read_frame([self])


def read_frame(records: Iterable[Record]) -> "pd.DataFrame":
    """Rows of records of one kind in one frame: the union of their columns by name, the declared ones first."""
    import pyarrow as pa

    records = list(records)
    kinds = {record.kind for record in records}
    if len(kinds) != 1:
        raise RecordError(f"one frame holds rows of one kind, not of {', '.join(sorted(kinds)) or 'no record'}")
    declared = schema.arrow_schema(kinds.pop())
    tables = [declared.empty_table()]
    try:
        for record in records:
            is_file = record.path.suffix != SUFFIX
            tables.append(read_table(record.path) if is_file else pa.Table.from_pylist(record.row_dicts, declared))
        frame: pd.DataFrame = pa.concat_tables(tables, promote_options="default").to_pandas()
    except (pa.ArrowException, ValueError) as error:
        names = ", ".join(record.path.name for record in records[:4])
        raise RecordError(f"columns of {names} do not fit together: {first_line(error)}") from error
    return frame


def read_table(path: Path) -> Any:
    """A Parquet file's rows as a pyarrow table without metadata; RecordError in a sentence when it is broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # one file, as it is: no partition column from a folder called year=YYYY
        table = pq.ParquetFile(path).read().replace_schema_metadata(None)
        table.validate(full=True)  # damaged text is found here, not where a row is printed
        return table
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RecordError(f"{path.name} is a broken Parquet file: {first_line(error)}") from error


def load_record(path: Path) -> Record:
    """The record in one file, Parquet or journal; RecordError when it is missing, broken or not a run record."""
    if path.suffix == SUFFIX:
        return Record(path, usable(path, read_journal(path)[0]))
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.is_dir():
        raise RecordError(f"cannot read {path}: it is a folder")
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except FileNotFoundError as error:
        raise RecordError(f"no record file {path}") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        # pyarrow says OSError for damage too, but only the system's own errors have a number
        if isinstance(error, OSError) and error.errno:
            raise RecordError(f"cannot read {path}: {error.strerror}") from error
        raise RecordError(f"{path.name} is not a Parquet file: {first_line(error)}") from error
    try:
        document = json.loads(metadata[schema.DOCUMENT_KEY])
        json.dumps(document, ensure_ascii=False).encode()  # half an emoji could be neither printed nor copied
    except KeyError as error:
        raise RecordError(
            f"{path.name} is a Parquet file without a run document: pocketllm did not write it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path.name}: its run document is not JSON: {first_line(error)}") from error
    return Record(path, usable(path, document), metadata)


def usable(path: Path, document: Any) -> dict[str, Any]:
    """A document that readers can rely on; RecordError names the file."""
    try:
        return schema.check_document(document)
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


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


def list_records(
    dirs: Iterable[Path], kind: str | None = None, on_problem: Callable[[RecordError], None] | None = None
) -> list[Record]:
    """Records under folders, oldest first; a file that cannot be read raises, or goes to `on_problem` when given."""
    records = []
    for path in record_files(dirs).values():
        try:
            record = load_record(path)
        except RecordError as error:
            if on_problem is None:
                raise
            on_problem(error)
            continue
        if kind is None or record.kind == kind:
            records.append(record)
    return records


def read_record(path_or_id: Path | str, dirs: Iterable[Path] | None = None) -> Record:
    """A record by its file, or by a prefix of its id that only one record under `dirs` has."""
    if Path(path_or_id).suffix in (".parquet", SUFFIX):
        return load_record(Path(path_or_id))
    prefix = str(path_or_id).strip().upper()
    found = record_files(search_dirs() if dirs is None else dirs)
    matches = [run_id for run_id in found if prefix and run_id.startswith(prefix)]
    if not matches:
        raise RecordError(f"no record's id begins with {str(path_or_id)!r}; `pocketllm records ls` lists them")
    if len(matches) > 1:
        shown = ", ".join(matches[:8]) + (f" and {len(matches) - 8} more" if len(matches) > 8 else "")
        raise RecordError(f"{len(matches)} records' ids begin with {prefix!r}: {shown}; give more letters")
    return load_record(found[matches[0]])


# -- promoting ---------------------------------------------------------------------------------------------------------
def keep(
    path_or_id: Path | str, root: Path | None = None, dirs: Iterable[Path] | None = None, force: bool = False
) -> Path:
    """Copy a record, byte for byte, to `records/<kind>/year=YYYY/<id>.parquet` under the working directory.

    Refuses an incomplete record always, and an INVALID bench run unless forced: it proves nothing either way.
    """
    record = read_record(path_or_id, dirs)
    if not record.complete:
        raise RecordError(
            f"record {record.run_id} is incomplete: it was killed, interrupted or still runs; run it again"
        )
    if record.kind == "bench" and not record.document.get("valid") and not force:
        raise RecordError(
            f"bench record {record.run_id} is INVALID; `--force` keeps it all the same, as a negative result"
        )
    year = str(record.document.get("started_utc"))[:4]
    if not (ULID.fullmatch(record.run_id) and year.isdecimal()):
        raise RecordError(f"{record.path.name} has no id and date that a file could be named by: it is not ours")
    target = (root or Path.cwd() / RECORDS) / record.kind / f"year={year}" / f"{record.run_id}.parquet"
    if target.exists():
        if target.read_bytes() != record.path.read_bytes():
            raise RecordError(f"{target} exists and differs: a record is never edited")
        return target
    prove_writable(target.parent)
    partial = target.with_suffix(".partial")
    try:
        shutil.copyfile(record.path, partial)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RecordError(f"cannot write {target}: {error.strerror or error}") from error
    return target
