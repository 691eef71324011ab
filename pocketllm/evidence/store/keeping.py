"""Promoting a record: from the folder that nobody commits to the one that is reviewed like code."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from pocketllm.errors import RecordError
from pocketllm.evidence.store.folders import RECORDS, prove_writable
from pocketllm.evidence.store.reading import read_record

ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")


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
