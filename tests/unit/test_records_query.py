"""Questions to many records: frames, SQL, difference, trend, verification."""

import json
import math
import sys
import types
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.errors import OptionError, RecordError, UnsupportedFeatureError
from pocketllm.evidence import schema
from pocketllm.evidence.query.difference import difference
from pocketllm.evidence.query.frames import Frames
from pocketllm.evidence.query.sql import ask, num_queries
from pocketllm.evidence.query.trend import trends
from pocketllm.evidence.query.verify import verify
from pocketllm.evidence.store import RecordWriter, keep, read_record

MODEL = {"name": "smollm2-135m", "sha256": "ab" * 32, "architecture": "llama", "quant_types": ["F32", "Q4_1"]}
ARMS = [
    {"name": "base", "role": "baseline", "target": "engine", "options": {}},
    {"name": "b", "role": "candidate", "target": "engine", "options": {"prefill_chunk": 64}},
]
MS = 1_000_000


def result(ratio: float = 1.04, arm: str = "b", verdict: str | None = "SLOWER") -> dict[str, Any]:
    return {
        "metric": "decode",
        "arm": arm,
        "role": "candidate",
        "unit": "s/token",
        "primary": True,
        "n": 12,
        "ratio": ratio,
        "low": ratio - 0.01,
        "high": ratio + 0.01,
        "estimate": math.log(ratio),
        "se": 0.004,
        "df": 9,
        "floor": 0.005,
        "margin": 0.01,
        "mde": 0.011,
        "verdict": verdict,
        "reason": "beyond the margin",
        "outlying_blocks": 0,
        "flips_without_outliers": False,
    }


def row(arm: str, block: int, start_ms: int, error: str | None = None, phase: str = "measure") -> dict[str, Any]:
    """100 ms to the first of 5 tokens, 10 ms a token after it."""
    return {
        "arm": arm,
        "arm_role": "baseline",
        "block": block,
        "slot": block,
        "position": 0,
        "start": 0,
        "phase": phase,
        "request": 0,
        "n_prompt": 10,
        "n_out": 5,
        "error": error,
        "superblock": 0,
        "t_send_ns": start_ms * MS,
        "t_first_content_ns": (start_ms + 100) * MS,
        "t_last_ns": (start_ms + 140) * MS,
        "chunk_t_ns": [(start_ms + 100 + 10 * n) * MS for n in range(5)],
        "chunk_ntok": [1] * 5,
    }


ROWS = [row("base", 0, 0), row("base", 0, 500), row("b", 1, 1000), row("b", 1, 2000, "HTTP 500")]
ROWS += [row("b", 1, 0, None, "burnin")]


def bench(folder: Path, ratio: float = 1.04, valid: bool = True, nulls: bool = False, **document: Any) -> Path:
    start = {
        "device_class": "cpu",
        "model": MODEL,
        "scenario": "decode",
        "isolation": "toggle",
        "seed": 7,
        "arms": ARMS,
        "schedule": [["base", "b"]] * 12,
        "workload": {"n_prompt": 10, "n_out": 5},
        **document,
    }
    results = [result(ratio), *([{**result(1.0, "null", None), "role": "null"}] if nulls else [])]
    end = {"checks": [], "results": results, "valid": valid, "null_valid": valid, "served": False}
    with RecordWriter("bench", start, folder) as record:
        record.append(ROWS)
        return record.finish(end)


def golden(folder: Path, outcome: str = "IDENTICAL") -> Path:
    with RecordWriter("golden", {"device_class": "cpu", "model": MODEL}, folder) as record:
        record.append({"case": "capital", "entry_point": "http_chat", "check": "tokens", "outcome": outcome})
        return record.finish()


# -- frames ------------------------------------------------------------------------------------------------------------
def test_four_frames_hold_runs_requests_slots_and_results(tmp_path: Path) -> None:
    path, _ = bench(tmp_path), golden(tmp_path)
    frames = Frames.load(tmp_path)

    assert frames.runs["kind"].tolist() == ["bench", "golden"]
    assert frames.runs["model"].tolist() == ["smollm2-135m"] * 2
    assert json.loads(frames.runs["document"][0])["run_id"] == path.stem
    assert len(frames.requests) == len(ROWS)
    assert frames.results[["arm", "ratio", "verdict"]].values.tolist() == [["b", 1.04, "SLOWER"]]


def test_a_slot_is_the_median_of_its_measured_requests_and_counts_the_failed_ones(tmp_path: Path) -> None:
    bench(tmp_path)
    slots = Frames.load(tmp_path).slots.set_index("arm")

    assert slots["requests"].to_dict() == {"base": 2, "b": 2}
    assert slots["errors"].to_dict() == {"base": 0, "b": 1}
    assert slots.loc["base", ["ttft_s", "tpot_s", "e2el_s"]].tolist() == pytest.approx([0.1, 0.01, 0.14])


def test_frames_of_no_record_are_empty_and_have_their_columns(tmp_path: Path) -> None:
    frames = Frames.load(tmp_path)

    named = {"run_id": frames.runs, "n_out": frames.requests, "ttft_s": frames.slots, "ratio": frames.results}
    for column, frame in named.items():
        assert frame.empty
        assert column in frame


def version(path: Path, table: pa.Table, run_id: str, **document: Any) -> Path:
    """The table beside the file, as another version of the tool would have written it."""
    told = json.loads(table.schema.metadata[schema.DOCUMENT_KEY])
    told.pop("rows_sha256")
    text = json.dumps({**told, "run_id": run_id, **document}).encode()
    target = path.with_name(f"{run_id}.parquet")
    pq.write_table(table.replace_schema_metadata({schema.DOCUMENT_KEY: text}), target)
    return target


def newer(path: Path) -> Path:
    """The same run with a column and a document key more."""
    table = pq.read_table(path)
    later = table.append_column("joules", pa.array([1.5] * table.num_rows))
    later = later.replace_schema_metadata(table.schema.metadata)
    return version(path, later, "01ZZZZZZZZZZZZZZZZZZZZZZZZ", schema="1.9", weather="rain")


def older(path: Path) -> Path:
    """The same run as version 1.0 wrote it: without the columns that came later, and without digests."""
    table = pq.read_table(path).drop_columns(["point", "offered", "compiles", "srv_running"])
    return version(path, table, "01AAAAAAAAAAAAAAAAAAAAAAAA", schema="1.0")


def test_files_of_three_schema_versions_are_asked_together(tmp_path: Path) -> None:
    now = bench(tmp_path)
    newer(now)
    older(now)
    frames = Frames.load(tmp_path)

    assert len(frames.requests) == 3 * len(ROWS)
    assert frames.requests["joules"].notna().sum() == len(ROWS)
    assert len(frames.slots) == 2  # run_id is a column of the rows, which all three share
    assert ask(frames, "select count(joules), count(point), count(*) from requests").rows == ((5, 0, 15),)
    assert ask(frames, "select schema from runs order by 1").rows == (("1.0",), (schema.SCHEMA_VERSION,), ("1.9",))


# -- SQL ---------------------------------------------------------------------------------------------------------------
def test_sql_joins_the_views(tmp_path: Path) -> None:
    path = bench(tmp_path)
    query = "select run_id, s.arm, ratio from results join slots s using (run_id) where s.arm = 'b' and ratio > 1"

    assert ask(Frames.load(tmp_path), query).as_dicts() == [{"run_id": path.stem, "arm": "b", "ratio": 1.04}]


@pytest.mark.parametrize(
    "query",
    [
        "selec 1",
        "select nothing from results",
        "copy results to '{folder}/out.csv'",
        "select * from read_csv('/etc/passwd')",
        "set enable_external_access = true",
        "attach '{folder}/x.db'",
    ],
)
def test_a_query_that_is_wrong_or_reaches_for_files_is_refused_in_a_sentence(tmp_path: Path, query: str) -> None:
    bench(tmp_path)

    with pytest.raises(
        OptionError, match=r"^the query cannot be answered: [^\n]+; views: runs, requests, slots, results$"
    ):
        ask(Frames.load(tmp_path), query.format(folder=tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".parquet"]


@pytest.mark.parametrize("query", ["", "-- nothing"])
def test_an_empty_query_is_refused_in_a_sentence(tmp_path: Path, query: str) -> None:
    with pytest.raises(OptionError, match="the query is empty"):
        ask(Frames.load(tmp_path), query)


@pytest.mark.parametrize(
    "query",
    [
        "select 1; select 2",
        "select 1;select 1;",
        "pivot results on arm;pivot results on arm",
        "create temp table t as select 1; from t",
        "select arm from results; selec 1",
    ],
)
def test_of_two_queries_none_is_answered_unseen(tmp_path: Path, query: str) -> None:
    with pytest.raises(OptionError, match=r"^(2 queries were given, and the answer is to one: |the query cannot)"):
        ask(Frames.load(tmp_path), query)


@pytest.mark.parametrize(
    "query",
    ["select 1;", ";; select 1 ;", "select 1 -- and; more", "select length(';')", "with a as (select 1) from a"],
)
def test_a_semicolon_is_no_second_query(tmp_path: Path, query: str) -> None:
    assert ask(Frames.load(tmp_path), query).rows == ((1,),)


def test_a_pivot_is_one_query(tmp_path: Path) -> None:
    bench(tmp_path)

    assert ask(Frames.load(tmp_path), "pivot results on arm using count(*)").columns[-1] == "b"


class OldStatement:
    """A statement as DuckDB 1.1 to 1.4 tell it."""

    def __init__(self, kind: str, text: str | None) -> None:
        self.type = types.SimpleNamespace(name=kind)
        self.text = text

    @property
    def query(self) -> str:
        if self.text is None:
            raise IndexError("basic_string::substr: __pos (which is 30) > this->size() (which is 0)")
        return self.text


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ([("CREATE", ""), ("CREATE", ""), ("SELECT", "")], 1),
        ([("CREATE", ""), ("SELECT", ""), ("CREATE", ""), ("SELECT", None)], 2),
        ([("SELECT", "select 1"), ("CREATE", ""), ("SELECT", None)], 2),
        ([("CREATE", "create temp table t as select 1"), ("SELECT", " from t")], 2),
        ([("SELECT", "select 1"), ("SELECT", "select 1")], 2),
    ],
    ids=str,
)
def test_statements_of_an_older_duckdb_are_counted_as_queries(told: list[tuple[str, str | None]], count: int) -> None:
    assert num_queries([OldStatement(*words) for words in told]) == count


def test_without_duckdb_the_way_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)

    with pytest.raises(UnsupportedFeatureError, match=r"needs DuckDB.*pocketllm\[sql\]"):
        ask(Frames.load(tmp_path), "select 1")


# -- difference --------------------------------------------------------------------------------------------------------
def test_a_difference_tells_what_was_made_otherwise_and_both_outcomes(tmp_path: Path) -> None:
    first = read_record(bench(tmp_path))
    second = read_record(
        bench(tmp_path, 1.01, margin={"decode": 0.02}, arms=[ARMS[0], {**ARMS[1], "options": {"prefill_chunk": 32}}])
    )
    found = difference(first, second)

    made = {change.name: (change.first, change.second) for change in found.made}
    assert made["arms.b.options.prefill_chunk"] == (64, 32)
    assert made["margin.decode"] == (None, 0.02)
    assert not any(name.startswith(("run_id", "started", "results")) for name in made)
    assert [(p.name, p.first, p.same) for p in found.outcome] == [("decode, b", "1.040 (1.030–1.050) SLOWER", False)]
    assert any("no verdict" in warning for warning in found.warnings)


def test_a_record_does_not_differ_from_itself(tmp_path: Path) -> None:
    record = read_record(bench(tmp_path))
    found = difference(record, record)

    assert found.made == ()
    assert all(pair.same for pair in found.outcome)


def test_golden_records_are_compared_case_by_case_and_kinds_are_not_mixed(tmp_path: Path) -> None:
    first, second = read_record(golden(tmp_path)), read_record(golden(tmp_path, "REGRESSION"))

    [pair] = difference(first, second).outcome
    assert (pair.first, pair.second, pair.same) == ("IDENTICAL", "REGRESSION", False)
    mixed = difference(first, read_record(bench(tmp_path)))
    assert mixed.outcome == ()
    assert "only how they were made is compared" in mixed.warnings[0]


def test_what_an_invalid_run_says_is_called_no_finding(tmp_path: Path) -> None:
    valid, invalid = read_record(bench(tmp_path)), read_record(bench(tmp_path, valid=False))

    assert any("is INVALID: nothing in it is a finding" in warning for warning in difference(valid, invalid).warnings)


# -- trend -------------------------------------------------------------------------------------------------------------
def test_a_trend_holds_comparable_valid_runs_in_order(tmp_path: Path) -> None:
    records = [read_record(bench(tmp_path, ratio)) for ratio in (1.04, 1.02)]
    records += [read_record(bench(tmp_path, 1.5, valid=False)), read_record(golden(tmp_path))]
    other = read_record(bench(tmp_path, 1.3, workload={"n_prompt": 512, "n_out": 5}))
    long, short = trends([*reversed(records), other])

    assert [point.ratio for point in long.points] == [1.04, 1.02]
    assert [point.ratio for point in short.points] == [1.3]
    assert (long.arm, long.baseline, long.metric) == ("b", "base", "decode")
    assert trends(records, metric="prefill") == []
    assert len(trends(records, scenario="decode", metric="decode", arm="b")) == 1


# -- verification ------------------------------------------------------------------------------------------------------
def test_a_record_as_it_was_written_is_whole(tmp_path: Path) -> None:
    for path in (bench(tmp_path), golden(tmp_path)):
        finding = verify(path)

        assert (finding.faults, finding.notes) == ((), ())


def rewritten(path: Path, table: Any = None, **document: Any) -> Path:
    """The file with other rows, or another document, its digests left as they were."""
    before = pq.read_table(path)
    metadata = dict(before.schema.metadata)
    if document:
        told = {**json.loads(metadata[schema.DOCUMENT_KEY]), **document}
        metadata[schema.DOCUMENT_KEY] = json.dumps(told, ensure_ascii=False).encode()
    pq.write_table((before if table is None else table).replace_schema_metadata(metadata), path)
    return path


def test_a_number_changed_in_a_row_is_found(tmp_path: Path) -> None:
    path = bench(tmp_path)
    table = pq.read_table(path)
    faster = pa.array([4] * table.num_rows, pa.int32())
    rewritten(path, table.set_column(table.schema.get_field_index("n_out"), "n_out", faster))

    assert verify(path).faults == ("its rows are not those that were written (rows_sha256 differs)",)


def test_a_row_left_out_is_found(tmp_path: Path) -> None:
    path = bench(tmp_path)
    rewritten(path, pq.read_table(path).slice(1))

    assert "rows_sha256 differs" in verify(path).faults[0]


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"valid": False}, "its document is not the one that was written"),
        ({"run_id": "01ZZZZZZZZZZZZZZZZZZZZZZZZ"}, "its document says 01ZZ"),
        ({"argv": ["pocketllm", "see /tmp/secret/file.gguf"]}, "what should be redacted, under argv"),
        ({"results": None}, "its digest differs"),
    ],
)
def test_a_document_changed_by_hand_is_found(tmp_path: Path, document: dict[str, Any], fault: str) -> None:
    assert fault in "; ".join(verify(rewritten(bench(tmp_path), **document)).faults)


def test_a_file_under_another_name_or_in_another_folder_is_found(tmp_path: Path) -> None:
    path = keep(bench(tmp_path), root=tmp_path / "records")
    assert verify(path).faults == ()

    moved = path.rename(path.with_name("01ZZZZZZZZZZZZZZZZZZZZZZZZ.parquet"))
    assert "it is called 01ZZ" in verify(moved).faults[0]
    (tmp_path / "records" / "golden" / "year=1999").mkdir(parents=True)
    lost = moved.rename(tmp_path / "records" / "golden" / "year=1999" / path.name)
    kind, year = verify(lost).faults
    assert "lies under golden/" in kind
    assert "lies under year=1999" in year


def test_a_column_of_another_type_and_a_broken_file_are_found(tmp_path: Path) -> None:
    path = bench(tmp_path)
    table = pq.read_table(path)
    text = pa.array(["five"] * table.num_rows)
    rewritten(path, table.set_column(table.schema.get_field_index("n_out"), "n_out", text))

    assert "n_out='five' is a str, not int32" in verify(path).faults[0]
    path.write_bytes(path.read_bytes()[:100])
    assert "is not a Parquet file" in verify(path).faults[0]


def test_a_row_that_names_a_user_is_found(tmp_path: Path) -> None:
    path = bench(tmp_path)
    table = pq.read_table(path)
    told = pa.repeat(pa.scalar("no file /home/somebody/x.gguf"), len(table))
    pq.write_table(table.set_column(table.schema.get_field_index("error"), "error", told), path)

    assert "it tells what should be redacted, under column error" in verify(path).faults


def with_column(path: Path, value: pa.Scalar) -> Path:
    """The record with a column that a later version might have added, digest left alone."""
    table = pq.read_table(path)
    pq.write_table(table.append_column("later", pa.repeat(value, len(table))), path)
    return path


def test_a_column_of_a_type_that_this_version_never_writes_is_read_and_told(tmp_path: Path) -> None:
    path = with_column(bench(tmp_path), pa.scalar(datetime(2026, 1, 1), pa.timestamp("ns")))

    assert "rows_sha256 differs" in " ".join(verify(path).faults)
    assert "later" in Frames.load(tmp_path).requests


def test_a_date_that_is_none_is_a_broken_file(tmp_path: Path) -> None:
    path = with_column(bench(tmp_path), pa.scalar(2**60, pa.date64()))

    assert "broken Parquet file" in " ".join(verify(path).faults)
    with pytest.raises(RecordError, match="do not fit together"):
        _ = Frames.load(tmp_path).requests


def test_an_old_record_without_digests_and_one_judged_by_other_rules_are_noted(tmp_path: Path) -> None:
    assert verify(older(bench(tmp_path))).notes == ("written before records carried digests",)
    other = bench(tmp_path, rules_sha256="0" * 64)
    assert verify(other, "1" * 64).notes == ("judged by other verdict rules than this version's",)
    assert verify(other, "0" * 64).notes == ()


def test_the_journal_of_a_killed_run_is_whole_as_far_as_it_goes(tmp_path: Path) -> None:
    RecordWriter("golden", {"device_class": "cpu", "model": MODEL}, tmp_path)
    [path] = tmp_path.glob("*.journal")

    finding = verify(path)
    assert finding.faults == ()
    assert "incomplete" in finding.notes[0]


COMMITTED = sorted((Path(__file__).parents[2] / "records").glob("*/year=*/*.parquet"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_is_whole(path: Path) -> None:
    assert verify(path).faults == ()


# -- through the app ---------------------------------------------------------------------------------------------------
def call(folder: Path, *words: str, expected: int = 0) -> Any:
    result = CliRunner().invoke(app, ["records", *words, "--record-dir", str(folder)], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


def test_sql_answers_as_text_csv_and_json(tmp_path: Path) -> None:
    bench(tmp_path)
    query = "select arm, ratio, verdict from results"

    assert call(tmp_path, "sql", query).stdout.splitlines() == ["arm  ratio  verdict", "b    1.04   SLOWER"]
    assert call(tmp_path, "sql", query, "--csv").stdout.splitlines() == ["arm,ratio,verdict", "b,1.04,SLOWER"]
    assert json.loads(call(tmp_path, "sql", query, "--json").stdout) == [
        {"arm": "b", "ratio": 1.04, "verdict": "SLOWER"}
    ]
    assert "views: runs, requests, slots, results" in call(tmp_path, "sql", "selec", expected=2).stderr
    assert "not both" in call(tmp_path, "sql", query, "--csv", "--json", expected=2).stderr


def test_sql_answers_json_holds_dates_inside_lists_and_loses_no_column(tmp_path: Path) -> None:
    nested = "select [DATE '2020-01-02'] as days, {'at': TIMESTAMP '2020-01-02 03:04:05'} as row"

    assert json.loads(call(tmp_path, "sql", nested, "--json").stdout) == [
        {"days": ["2020-01-02"], "row": {"at": "2020-01-02 03:04:05"}}
    ]
    assert call(tmp_path, "sql", nested, "--csv").stdout.splitlines()[1].startswith("['2020-01-02'],")
    twice = call(tmp_path, "sql", "select 1 as a, 2 as a", "--json", expected=2).stderr
    assert "two columns are called 'a'" in twice


def test_a_difference_is_printed_fact_by_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the machine's load and free memory are facts too, and others of its processes change them
    monkeypatch.setattr("pocketllm.evidence.provenance.volatile_facts", lambda: {"load_1m": 0.5})
    first, second = bench(tmp_path).stem, bench(tmp_path, 1.01, seed=8).stem
    result = call(tmp_path, "diff", first, second)

    assert result.stdout.splitlines()[:4] == ["How they were made", "  seed", "    - 7", "    + 8"]
    assert "decode, b  1.040 (1.030–1.050) SLOWER  1.010 (1.000–1.020) SLOWER  differs" in result.stdout
    assert "has no verdict" in result.stderr
    assert json.loads(call(tmp_path, "diff", first, second, "--json").stdout)["made"][0]["name"] == "seed"


def test_a_trend_is_a_line_a_run(tmp_path: Path) -> None:
    for ratio in (1.04, 0.97):
        bench(tmp_path, ratio, nulls=True)
    lines = call(tmp_path, "trend").stdout.splitlines()

    assert lines[0] == "decode, decode: b against base (toggle)"
    assert [line.split()[-1] for line in lines[3:]] == ["SLOWER", "SLOWER"]
    assert "null against base" in call(tmp_path, "trend", "--arm", "null").stdout
    assert "no valid bench records" in call(tmp_path, "trend", "--metric", "ttft").stderr
    assert len(json.loads(call(tmp_path, "trend", "--json").stdout)[0]["points"]) == 2


def test_verify_ends_with_1_when_a_file_is_not_what_it_claims(tmp_path: Path) -> None:
    good, bad = bench(tmp_path), bench(tmp_path)
    lines = call(tmp_path, "verify").stdout.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [f"whole   {path.name}" for path in (good, bad)]
    assert lines.count("  note: not computed again: it names no verdict rules, or keeps no chunk times") == 2

    rewritten(bad, valid=False)
    result = call(tmp_path, "verify", expected=1)
    assert f"BROKEN  {bad.name}" in result.stdout
    assert "1 of 2 records are whole" in result.stderr
    assert call(tmp_path, "verify", good.stem).exit_code == 0
    assert [item["whole"] for item in json.loads(call(tmp_path, "verify", "--json", expected=1).stdout)] == [
        True,
        False,
    ]
