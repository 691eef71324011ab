"""What a record concludes follows from its own rows, and a record of which that is not so is found."""

import copy
from pathlib import Path
from typing import Any

import pytest

from pocketllm.bench.analysis.again import differences
from pocketllm.bench.analysis.rules import rules_sha256
from pocketllm.evidence.query.verify import verify
from pocketllm.evidence.store import read_record
from tests.unit.test_bench_run import run


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_record(run(tmp_path_factory.mktemp("again")).path)


def test_the_ratios_of_a_run_are_found_again_in_its_rows(record: Any) -> None:
    assert differences(record.document, record.row_dicts) == []


def test_rows_that_say_something_else_are_found(record: Any) -> None:
    rows = copy.deepcopy(record.row_dicts)
    for row in rows:
        if row["arm"] == "b" and row["phase"] == "measure":
            row["chunk_t_ns"] = [stamp + 1_000_000 * n for n, stamp in enumerate(row["chunk_t_ns"])]

    sentences = differences(record.document, rows)
    assert any(text.startswith("decode, b: its rows give a time ratio of 1.29") for text in sentences), sentences


def test_a_result_that_no_row_supports_is_found(record: Any) -> None:
    document = copy.deepcopy(record.document)
    document["results"].append({**document["results"][0], "arm": "c"})

    assert f"{document['results'][0]['metric']}, c: its rows give no such result" in differences(
        document, record.row_dicts
    )


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        *(("ratio", 0.5), ("low", 1.2), ("high", 1.3), ("se", 1e-4), ("df", 40), ("n", 99), ("p_holm", 0.9)),
        *(("margin", 0.5), ("floor", 0.0), ("mde", 1e-4), ("verdict", "FASTER"), ("role", "null"), ("primary", False)),
    ],
)
def test_a_figure_or_word_that_the_rows_do_not_give_is_found(record: Any, field: str, lie: object) -> None:
    document = copy.deepcopy(record.document)
    result = next(one for one in document["results"] if (one["metric"], one["arm"]) == ("decode", "b"))
    assert result[field] != lie
    result[field] = lie

    assert any(text.startswith("decode, b: its rows give ") for text in differences(document, record.row_dicts))


def test_a_result_that_is_kept_back_is_found(record: Any) -> None:
    document = copy.deepcopy(record.document)
    document["results"] = [one for one in document["results"] if (one["metric"], one["arm"]) != ("decode", "b")]

    assert "decode, b: its rows give a result that is left out" in differences(document, record.row_dicts)


def test_a_run_that_calls_itself_valid_in_spite_of_its_rows_is_found(record: Any) -> None:
    rows = copy.deepcopy(record.row_dicts)
    for row in rows:
        row["n_cached"] = 5 if row["arm"] == "b" else 0

    assert "by its rows and checks it is INVALID, and it says otherwise" in differences(record.document, rows)


def test_a_floor_that_came_from_past_runs_is_believed(record: Any) -> None:
    document = copy.deepcopy(record.document)
    for result in document["results"]:
        if result["floor"] is not None:
            result |= {"floor": 0.3, "floor_source": "90th percentile of 9 past null arms"}
            result["verdict"] = result["verdict"] and "SMALL"

    assert differences(document, record.row_dicts) == []


def test_a_lost_block_that_is_not_told_is_found(record: Any) -> None:
    rows = copy.deepcopy(record.row_dicts)
    next(row for row in rows if row["phase"] == "measure" and row["block"] == 3)["error"] = "HTTP 500"

    assert "its rows have 11 valid blocks, not 12" in differences(record.document, rows)


def test_verify_asks_for_it_only_where_the_rules_are_the_same(record: Any) -> None:
    def never(document: Any, rows: Any) -> list[str]:
        return ["asked"]

    assert verify(record.path, rules_sha256(), never).faults == ("asked",)
    assert verify(record.path, "0" * 64, never).faults == ()
    assert verify(record.path, rules_sha256(), differences).faults == ()


def test_a_run_in_process_isolation_is_computed_over_its_starts(tmp_path: Path, record: Any) -> None:
    document, rows = copy.deepcopy(record.document), copy.deepcopy(record.row_dicts)
    document["isolation"] = "process"
    for row in rows:
        row["start"] = (row["block"] or 0) // 6

    # another estimator, so other figures: the start level averages where the block level regresses
    assert differences(document, rows) != []
