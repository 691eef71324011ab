"""The status ladder: a rung is a query over committed records, never a written word.

Proofs are of the same checkpoint sha256 and device class (rung 1: any device class, for an inspection runs nothing;
rung 2: the same family, quant types and device class):

0 unproven        nothing
1 inspect only    an `inspect` record without errors
2 experimental    + `parity` records inside tolerance that cover the family and every quant type of the checkpoint,
                  or one of 64 positions or more of the checkpoint itself
3 text, CLI only  + a `golden` record of the whole suite through `generate`, all IDENTICAL or TIE, + a valid `bench`
                  record with a null arm
4 text + server   + a `golden` record of the whole suite through HTTP (stream and not, concurrency 2, cancel, shutdown),
                  + a served `bench`

A rung stands on the ones below it. A suite is the model's accepted fixtures; one that leaves out a kind of case that
every suite has proves nothing. Freshness stands beside the rung and never changes it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pocketllm.evidence.ladder.freshness import freshened
from pocketllm.evidence.ladder.rows import UNKNOWN, WORDS, Evidence, LadderRow, Proof, subjects
from pocketllm.evidence.ladder.rungs import climb
from pocketllm.evidence.ladder.suite import NO_SUITE, Suite, suites_of
from pocketllm.evidence.schema import KINDS
from pocketllm.evidence.store import Record, list_records

__all__ = ["UNKNOWN", "WORDS", "Evidence", "LadderRow", "Proof", "compute", "ladder", "load", "undated"]

SERVED_CLASSES = frozenset({"attach", "process"})
"""Isolation classes whose arms are servers, of any make."""
JUDGED_BY_ROWS = frozenset({"golden", "parity"})
"""Kinds whose rows prove or fail; of a benchmark the document says all."""


def ladder(records: Path) -> list[LadderRow]:
    """The ladder of the records kept under a `records/` folder; RecordError when one of them cannot be read."""
    return freshened(undated(load(records), records), records)


def undated(evidence: Iterable[Evidence], records: Path) -> list[LadderRow]:
    """The ladder of loaded records and of the fixtures beside them; freshness is left unknown."""
    return compute(evidence, suites_of(records))


def load(records: Path) -> list[Evidence]:
    """Complete records of a `records/` folder, oldest first; those in `records/local/` are not evidence."""
    folders = [records / kind for kind in KINDS if (records / kind).is_dir()]
    return [evidence_of(found, records) for found in list_records(folders) if found.complete]


def evidence_of(record: Record, records: Path) -> Evidence:
    """A record as evidence, its rows read only where a rung asks about rows."""
    rows = record.row_dicts if record.kind in JUDGED_BY_ROWS else ()
    return Evidence(record.run_id, record.kind, record.document, rows, record.path.relative_to(records).as_posix())


def compute(evidence: Iterable[Evidence], suites: Mapping[str, Suite]) -> list[LadderRow]:
    """The ladder of loaded records, by model name, then device class; pure. Freshness is left unknown.

    A golden record proves something only when it holds every case of the model's suite.
    """
    ordered = sorted(evidence, key=lambda item: item.run_id)
    superseded = {run_id for item in ordered for run_id in item.document.get("supersedes") or ()}
    counted = [item for item in ordered if item.run_id not in superseded and speaks_of_us(item)]
    return [climb(subject, counted, suites.get(subject.model, NO_SUITE)) for subject in subjects(counted)]


def speaks_of_us(item: Evidence) -> bool:
    """Whether a record is about this engine: no golden run mutated on purpose, no recording, nothing against a URL.

    A bench run against servers counts where its baseline is this engine, which the run has found out (`served`); one
    with an arm slowed on purpose is about the instrument.
    """
    if item.kind == "golden":
        selection = item.document.get("selection")
        by_url = isinstance(selection, Mapping) and selection.get("url")
        # a recording compares an answer with its own repeats, which proves nothing of the checkpoint
        return not (item.document.get("mutate") or item.document.get("recording") or by_url)
    by_servers = item.kind == "bench" and item.document.get("isolation") in SERVED_CLASSES
    return not item.is_staged and (not by_servers or item.document.get("served") is True)
