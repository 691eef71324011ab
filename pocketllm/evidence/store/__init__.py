"""Where run records live: one immutable Parquet file a run, which explains itself through the document inside it.

    with RecordWriter("bench", document, record_dir(None)) as record:
        for slot in slots:
            record.append(measure(slot))        # durable at once: a crash keeps what was paid for
        path = record.finish({"results": ..., "checks": ...})

New runs land in `records/local/` of the working directory (or the user's data folder where that cannot be written);
`keep` promotes one to `records/<kind>/year=YYYY/`, where it is reviewed and committed like code.
"""

from pocketllm.evidence.store.folders import LOCAL, files_in, record_dir, search_dirs
from pocketllm.evidence.store.keeping import ULID, keep
from pocketllm.evidence.store.reading import Record, list_records, load_record, read_frame, read_record
from pocketllm.evidence.store.writing import FREE_TEXT, RecordWriter, new_ulid, utc_now

__all__ = [
    "FREE_TEXT",
    "LOCAL",
    "ULID",
    "Record",
    "RecordWriter",
    "files_in",
    "keep",
    "list_records",
    "load_record",
    "new_ulid",
    "read_frame",
    "read_record",
    "record_dir",
    "search_dirs",
    "utc_now",
]
