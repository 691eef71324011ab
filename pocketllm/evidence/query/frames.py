"""Records as four pandas frames: runs, requests, slots, results.

    from pocketllm.evidence.query.frames import Frames
    frames = Frames.load()
    frames.results.query("verdict == 'SLOWER'")

Columns are united by name over schema versions; what a record does not say is missing, not guessed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pocketllm.errors import RecordError
from pocketllm.evidence import schema
from pocketllm.evidence.store import Record, list_records, read_frame, search_dirs

if TYPE_CHECKING:
    import pandas as pd

RUN_COLUMNS = (
    *("run_id", "kind", "schema", "complete", "valid", "started_utc", "finished_utc", "scenario", "isolation", "seed"),
    *("blocks", "valid_blocks", "wall_s", "device_class", "model", "model_sha256", "architecture", "cpu", "cores"),
    *("gpu", "memory_gib", "backend", "commit", "dirty", "tool_version", "source", "path", "document"),
)
RESULT_COLUMNS = (
    *("run_id", "started_utc", "scenario", "isolation", "valid", "metric", "arm", "role", "unit", "primary", "n"),
    *("n_unit", "ratio", "low", "high", "estimate", "se", "df", "sd", "p_holm", "floor", "margin", "mde"),
    "bias",
    *("verdict", "reason", "outlying_blocks", "flips_without_outliers"),
)
SLOT_KEY = ["run_id", "start", "superblock", "block", "slot", "position", "prev_arm", "arm", "arm_role", "point"]


@dataclass(frozen=True)
class Frames:
    """Frames of a set of records, each made when it is asked for."""

    records: tuple[Record, ...]

    @classmethod
    def load(cls, folder: Path | None = None, on_problem: Callable[[RecordError], None] = lambda problem: None) -> Self:
        """Records of a folder, or of those that `pocketllm records` looks in; one that cannot be read is passed on."""
        return cls(tuple(list_records(search_dirs(folder), on_problem=on_problem)))

    @cached_property
    def runs(self) -> "pd.DataFrame":
        """One row a record of any kind; `document` is its whole run document as JSON text."""
        return frame_of((run_row(record) for record in self.records), RUN_COLUMNS)

    @cached_property
    def results(self) -> "pd.DataFrame":
        """One row a contrast of a bench run, times as ratios to the baseline."""
        rows = (row for record in self.of_kind("bench") for row in result_rows(record))
        return frame_of(rows, RESULT_COLUMNS)

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """One row a request of a bench run, warm-up and burn-in included (`phase`)."""
        records = self.of_kind("bench")
        if records:
            return read_frame(records)
        empty: pd.DataFrame = schema.arrow_schema("bench").empty_table().to_pandas()
        return empty

    @cached_property
    def slots(self) -> "pd.DataFrame":
        """One row a slot and point: medians over its measured requests, in seconds, by the client's clock.

        ttft_s, tpot_s and e2el_s are those of docs/bench.md; a slot with failed requests has `errors` > 0.
        """
        requests = self.requests
        measured = requests[requests["phase"] == "measure"].copy()
        failed = measured["error"].notna()
        first = (measured["t_first_content_ns"] - measured["t_send_ns"]) / 1e9
        whole = (measured["t_last_ns"] - measured["t_send_ns"]) / 1e9
        tokens = measured["n_out"].astype("float64")
        measured = measured.assign(
            ttft_s=first.mask(failed),
            e2el_s=whole.mask(failed),
            tpot_s=((whole - first) / (tokens - 1)).where((tokens > 1) & ~failed),
            errors=failed,
        )
        grouped = measured.groupby(SLOT_KEY, dropna=False, sort=False)
        return grouped.agg(
            requests=("request", "size"),
            errors=("errors", "sum"),
            n_prompt=("n_prompt", "sum"),
            n_out=("n_out", "sum"),
            ttft_s=("ttft_s", "median"),
            tpot_s=("tpot_s", "median"),
            e2el_s=("e2el_s", "median"),
        ).reset_index()

    def of_kind(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for record in self.records if record.kind == kind]


def frame_of(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> "pd.DataFrame":
    """A frame with these columns, also when there is no row."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns)).convert_dtypes()


def run_row(record: Record) -> dict[str, Any]:
    """A record in one flat row."""
    import json

    document = record.document
    model, code, tool = (mapping(document.get(key)) for key in ("model", "code", "tool"))
    hard = mapping(mapping(document.get("machine")).get("hard"))
    flat = {key: document.get(key) for key in RUN_COLUMNS if not isinstance(document.get(key), (dict, list))}
    return flat | {
        "run_id": record.run_id,
        "kind": record.kind,
        "complete": record.complete,
        "model": model.get("name"),
        "model_sha256": model.get("sha256"),
        "architecture": model.get("architecture"),
        "cpu": hard.get("cpu"),
        "cores": hard.get("cores_usable"),
        "gpu": ", ".join(hard.get("gpus") or ()) or None,
        "memory_gib": hard.get("memory_gib"),
        "backend": mapping(document.get("plan")).get("backend"),
        "commit": code.get("commit"),
        "dirty": code.get("dirty"),
        "tool_version": tool.get("version"),
        "path": str(record.path),
        "document": json.dumps(document, ensure_ascii=False),
    }


def result_rows(record: Record) -> Iterable[dict[str, Any]]:
    """The contrasts of a bench record; an incomplete or INVALID run keeps them, and says so in `valid`."""
    document = record.document
    shared = {key: document.get(key) for key in ("started_utc", "scenario", "isolation", "valid")}
    for result in document.get("results") or ():
        found = {key: value for key, value in result.items() if key in RESULT_COLUMNS}
        yield {"run_id": record.run_id, **shared, **found}


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
