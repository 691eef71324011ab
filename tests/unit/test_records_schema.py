"""The declared schema: what a row may hold, and what is refused."""

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.errors import RecordError
from pocketllm.evidence import schema
from pocketllm.evidence.columns import COLUMNS, COMMON_COLUMNS
from pocketllm.evidence.store import RecordWriter, read_frame, read_record

BENCH_ROW_OF_THE_DESIGN = """run_id, schema, kind, arm, arm_role, arm_sha256, start, superblock, block, slot, position,
prev_arm, phase, request, prompt_id, prompt_sha256, n_prompt, n_cached, n_out, t_sched_ns, t_send_ns, t_first_ns,
t_first_content_ns, t_last_ns, chunk_t_ns, chunk_ntok, srv_prefill_s, srv_decode_s, srv_queue_s, finish, http_status,
error, out_ids_sha256, loop_lag_ms, gpu_clk_sm, gpu_clk_mem, gpu_temp, gpu_power, throttle_mask, cpu_freq, rss, vram,
point, offered, compiles, srv_running"""

BENCH_DOCUMENT = {"device_class": "cpu", "scenario": "decode", "arms": [], "schedule": [], "seed": 1}
BENCH_END = {"checks": [], "results": [], "valid": True, "null_valid": True, "served": False}


def test_bench_rows_are_the_row_of_the_design() -> None:
    assert list(COLUMNS["bench"]) == BENCH_ROW_OF_THE_DESIGN.replace("\n", " ").split(", ")


def test_columns_of_schema_1_0_are_all_there_with_the_types_they_had() -> None:
    first = json.loads((Path(__file__).parent / "record_columns_1_0.json").read_text(encoding="utf-8"))

    changed = {kind: set(columns.items()) - set(COLUMNS[kind].items()) for kind, columns in first.items()}

    assert not any(changed.values()), "a type never changes: a new meaning is a new column and a new SCHEMA_VERSION"
    grown = any(set(COLUMNS[kind]) - set(columns) for kind, columns in first.items())
    assert grown == (schema.SCHEMA_VERSION != "1.0")


@pytest.mark.parametrize("kind", schema.KINDS)
def test_every_declared_column_has_an_arrow_type(kind: str) -> None:
    declared = schema.arrow_schema(kind)

    assert declared.names == list(COLUMNS[kind])
    assert not any(pa.types.is_null(field.type) for field in declared)


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match=r"no column 'ttft'.*ttft_s"):
        schema.check_rows("golden", [{"ttft": 1.0}])


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecordError, match=r"no record kind 'benhc'.*bench, golden"):
        schema.check_rows("benhc", [])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("n_out", "3"),
        ("n_out", 3.0),
        ("n_out", True),
        ("n_out", 1 << 31),
        ("t_send_ns", 1 << 63),
        ("arm", 3),
        ("srv_decode_s", "fast"),
        ("srv_decode_s", True),
        ("chunk_t_ns", 3),
        ("chunk_t_ns", [1, "2"]),
        ("chunk_ntok", [1 << 40]),
        ("arm", b"base"),
    ],
)
def test_a_wrong_type_is_refused_and_the_column_named(column: str, value: object) -> None:
    with pytest.raises(RecordError, match=column):
        schema.check_rows("bench", [{column: value}])


def test_a_truth_value_is_only_a_bool() -> None:
    with pytest.raises(RecordError, match="stream"):
        schema.check_rows("golden", [{"stream": 1}])


class Outcome(enum.Enum):
    IDENTICAL = "IDENTICAL"


def test_numpy_values_and_enums_become_plain_ones() -> None:
    [row] = schema.check_rows(
        "golden",
        [{"n_out": np.int64(3), "margin": np.float32(0.5), "stream": np.bool_(True), "outcome": Outcome.IDENTICAL}],
    )

    assert (row["n_out"], row["margin"], row["stream"], row["outcome"]) == (3, 0.5, True, "IDENTICAL")
    assert type(row["n_out"]) is int
    assert type(row["stream"]) is bool
    assert schema.check_rows("bench", [{"chunk_t_ns": np.array([1, 2])}])[0]["chunk_t_ns"] == [1, 2]


def test_nan_is_absent_and_infinity_is_kept() -> None:
    [row] = schema.check_rows("golden", [{"margin": math.nan, "regret": math.inf}])

    assert row["margin"] is None
    assert row["regret"] == math.inf


VALUES = {
    "string": st.text(),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "list<int64>": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    "list<int32>": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
}
OWN = frozenset(COMMON_COLUMNS)
ROWS = st.fixed_dictionaries(
    {},
    optional={name: st.none() | VALUES[kind] for name, kind in COLUMNS["bench"].items() if name not in OWN},
)


@settings(deadline=None)  # the first example imports pyarrow
@given(rows=st.lists(ROWS, max_size=3))
def test_what_the_checker_lets_through_arrow_stores_unchanged(rows: list[dict[str, object]]) -> None:
    checked = schema.check_rows("bench", rows)

    table = pa.Table.from_pylist(checked, schema=schema.arrow_schema("bench"))

    assert table.to_pylist() == checked
    assert all(
        row[name] == value for row, given_row in zip(checked, rows, strict=True) for name, value in given_row.items()
    )


def test_a_column_without_any_value_keeps_its_type(tmp_path: Path) -> None:
    with RecordWriter("bench", BENCH_DOCUMENT, tmp_path) as record:
        record.append({"arm": "base"})
        path = record.finish(BENCH_END)

    assert pq.read_schema(path).remove_metadata() == schema.arrow_schema("bench")


@dataclass(frozen=True)
class Arm:
    name: str
    weights: Path
    tags: frozenset[str]


def test_a_document_takes_what_json_can_hold_and_names_what_it_cannot() -> None:
    arm = Arm("base", Path("/some/where/model.gguf"), frozenset({"b", "a"}))

    assert schema.plain({"arms": (arm,), "mde": math.inf, "n": np.int32(3)}) == {
        "arms": [{"name": "base", "weights": "model.gguf", "tags": ["a", "b"]}],
        "mde": None,
        "n": 3,
    }
    with pytest.raises(RecordError, match=r"document.arms\[0\].handle is a object"):
        schema.plain({"arms": [{"handle": object()}]})


def newer_file(path: Path, older: Path) -> None:
    """The older record as a version 1.1 would write it: one more column, in front."""
    table = pq.read_table(older)
    metadata = table.schema.metadata
    table = table.add_column(0, "joules", pa.array([1.5] * table.num_rows))
    pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.fixture
def two_versions(tmp_path: Path) -> tuple[Path, Path]:
    with RecordWriter("bench", BENCH_DOCUMENT, tmp_path) as record:
        record.append([{"arm": "base", "n_out": 1}, {"arm": "null", "n_out": 2}])
        old = record.finish(BENCH_END)
    new = tmp_path / "01ZZZZZZZZZZZZZZZZZZZZZZZZ.parquet"
    newer_file(new, old)
    return old, new


def test_a_newer_file_with_a_column_more_reads_beside_an_older_one(two_versions: tuple[Path, Path]) -> None:
    old, new = two_versions

    frame = read_frame([read_record(old), read_record(new)])

    assert list(frame["n_out"]) == [1, 2, 1, 2]
    assert list(frame["joules"].isna()) == [True, True, False, False]


def test_an_older_file_with_a_column_less_reads_with_that_column_empty(tmp_path: Path) -> None:
    with RecordWriter("bench", BENCH_DOCUMENT, tmp_path) as record:
        record.append({"arm": "base", "rss": 7})
        path = record.finish(BENCH_END)
    pq.write_table(pq.read_table(path).drop_columns(["vram"]), path)

    assert read_record(path).row_dicts[0]["vram"] is None
    assert read_record(path).rows["vram"].isna().all()


def test_duckdb_reads_two_versions_together_by_name(two_versions: tuple[Path, Path]) -> None:
    duckdb = pytest.importorskip("duckdb", reason="missing-extra: sql (duckdb)")
    paths = [str(path) for path in two_versions]

    rows = duckdb.sql(f"select n_out, joules from read_parquet({paths}, union_by_name=true) order by joules, n_out")

    assert rows.fetchall() == [(1, 1.5), (2, 1.5), (1, None), (2, None)]
