"""A record as readers have it: its document, its rows when asked for; one sentence for a file that is damaged."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RecordError
from pocketllm.evidence import schema
from pocketllm.evidence.columns import COLUMNS
from pocketllm.evidence.journal import SUFFIX, read_journal
from pocketllm.evidence.store.folders import record_files, search_dirs

if TYPE_CHECKING:
    import pandas as pd


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
    if not matches and prefix and Path(path_or_id).is_file():
        raise RecordError(f"{path_or_id} is no run record: those are .parquet files, and {SUFFIX} while a run goes on")
    if not matches:
        raise RecordError(f"no record's id begins with {str(path_or_id)!r}; `pocketllm records ls` lists them")
    if len(matches) > 1:
        shown = ", ".join(matches[:8]) + (f" and {len(matches) - 8} more" if len(matches) > 8 else "")
        raise RecordError(f"{len(matches)} records' ids begin with {prefix!r}: {shown}; give more letters")
    return load_record(found[matches[0]])
