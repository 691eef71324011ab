"""Whether a record file is whole and says what its schema promises: digests, columns, keys, redaction, place."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.errors import RecordError
from pocketllm.evidence import schema
from pocketllm.evidence.columns import COLUMNS
from pocketllm.evidence.journal import SUFFIX
from pocketllm.evidence.provenance.redaction import scrub
from pocketllm.evidence.store import FREE_TEXT, ULID, Record, load_record

YEAR = re.compile(r"year=(\d{4})")


@dataclass(frozen=True)
class Finding:
    """What one file says of itself: faults make it untrustworthy, notes are worth knowing."""

    run_id: str
    path: Path
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()


Again = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], list[str]]
"""(document, rows) → what of a bench record's results does not follow from its rows."""


def verify(path: Path, rules_sha256: str | None = None, again: Again | None = None) -> Finding:
    """Check one file.

    rules_sha256: digest of this version's verdict rules, to say whether the run had the same; then `again` is asked
    whether a complete bench record's results follow from its rows.
    """
    try:
        record = load_record(path)
        rows = record.row_dicts
    except RecordError as error:
        return Finding(path.stem, path, (str(error),))
    faults = [*identity(record), *columns(record, rows), *keys(record), *privacy(record, rows)]
    digest_faults, notes = digests(record, rows)
    told = record.document.get("rules_sha256")
    if rules_sha256 is not None and told is not None and told != rules_sha256:
        notes.append("judged by other verdict rules than this version's")
    elif again is not None and record.kind == "bench" and record.complete and not faults and not digest_faults:
        if told is None or any(row["chunk_t_ns"] is None for row in rows if row["phase"] == "measure"):
            notes.append("not computed again: it names no verdict rules, or keeps no chunk times")
        else:
            faults += again(record.document, rows)
    if not record.complete:
        notes.append("incomplete: its run was killed, interrupted or still lasts")
    return Finding(record.run_id, path, (*faults, *digest_faults), tuple(notes))


def identity(record: Record) -> list[str]:
    """Id, file name and folder say the same."""
    document, path = record.document, record.path
    faults = []
    if not ULID.fullmatch(record.run_id):
        faults.append(f"its id {record.run_id!r} is not a ULID")
    if path.stem != record.run_id:
        faults.append(f"it is called {path.stem} and its document says {record.run_id}")
    year = YEAR.fullmatch(path.parent.name)
    if year and path.parent.parent.name != record.kind:
        faults.append(f"a {record.kind} record lies under {path.parent.parent.name}/")
    if year and not str(document.get("started_utc")).startswith(year[1]):
        faults.append(f"it was started {document.get('started_utc')} and lies under {path.parent.name}")
    return faults


def columns(record: Record, rows: list[dict[str, Any]]) -> list[str]:
    """Rows have the declared types and belong to this run; columns of a later version are left alone."""
    declared = COLUMNS[record.kind]
    try:
        schema.check_rows(record.kind, ({name: row[name] for name in declared} for row in rows))
    except RecordError as error:
        return [str(error)]
    foreign = {row["run_id"] for row in rows} - {record.run_id}
    return [f"it holds rows of other runs: {', '.join(map(str, sorted(foreign, key=str)))}"] if foreign else []


def keys(record: Record) -> list[str]:
    """The document has what its kind must say."""
    missing = schema.missing_keys(record.kind, record.document, schema.START_KEYS)
    if record.complete:
        missing += schema.missing_keys(record.kind, record.document, schema.END_KEYS)
    return [f"its document lacks {', '.join(missing)}"] if missing else []


def privacy(record: Record, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Nothing in the document, or in the sentences of its rows, would be redacted today."""
    changed = [key for key, value in record.document.items() if scrub(value) != value]
    texts = ((name, row.get(name)) for row in rows for name in FREE_TEXT)
    changed += dict.fromkeys(f"column {name}" for name, text in texts if text and scrub(text) != text)
    return [f"it tells what should be redacted, under {', '.join(changed)}"] if changed else []


def digests(record: Record, rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Faults and notes: document and rows are those that were written."""
    if record.path.suffix == SUFFIX:
        return [], []
    told = record.document.get("rows_sha256")
    if told is None:
        return [], ["written before records carried digests"]
    faults = []
    if told != schema.rows_sha256(rows):
        faults.append("its rows are not those that were written (rows_sha256 differs)")
    if record.metadata.get(schema.DIGEST_KEY) != schema.document_sha256(record.metadata[schema.DOCUMENT_KEY]):
        faults.append("its document is not the one that was written (its digest differs)")
    return faults, []
