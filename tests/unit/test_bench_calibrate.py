"""`pocketllm bench calibrate`, through the real app over arms with scripted latencies, and what is made of its rows."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from typer.testing import CliRunner

from pocketllm.bench.analysis import calibration
from pocketllm.bench.analysis.history import history_key, null_history
from pocketllm.bench.run import Done
from pocketllm.cli.bench.calibrate import Counted
from pocketllm.cli.main import app
from pocketllm.evidence.store import list_records, writing
from tests.ctrl_c import ctrl_c_heard, interrupted_while
from tests.fake_target import FakeTarget, fake_rig
from tests.unit.test_bench_run import run

RUNNER = CliRunner()
FLAGS = ("--blocks", "12", "--requests", "1", "--input-len", "16", "--output-len", "8")


def noisy(seed: int, sd: float = 0.002, stop_after: int | None = None, mean: float = 0.01) -> FakeTarget:
    """10 ms a token (or another mean) with a scatter; after so many requests somebody presses ctrl-C."""
    rng = np.random.default_rng(seed)

    def cost(number: int) -> tuple[float, float]:
        if number == stop_after:
            raise KeyboardInterrupt
        return tuple(mean * np.exp(rng.normal(0, sd, 2)))

    return FakeTarget(cost)


@pytest.fixture
def arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A working directory of its own, and a function that says what the arms are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def put(**changes: Any) -> None:
        targets = {name: noisy(seed, **changes) for seed, name in enumerate(("base", "again", "null"))}
        monkeypatch.setattr("pocketllm.bench.targets.rig.open_rig", lambda *_: fake_rig(targets))

    return put


def call(*words: str, expected: int = 0) -> Any:
    result = RUNNER.invoke(app, ["bench", "calibrate", *words], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


def only_record() -> Any:
    [record] = [found for found in list_records([Path("records")]) if found.kind == "calibration"]
    return record


def test_runs_of_a_against_a_become_one_record_and_a_summary(arms: Callable[..., None]) -> None:
    arms()
    text = call("--runs", "2", *FLAGS).stdout
    record = only_record()

    assert "decode: 2 A/A runs of 12 observations" in text
    assert "false calls: 0 of 2 verdicts" in text
    assert record.complete
    assert len(list_records([Path("records")])) == 1  # the single runs leave no records of their own
    rows = [row for row in record.row_dicts if row["metric"] == "decode"]
    told = [(row["run"], row["seed"], row["role"]) for row in rows]
    assert told == [(0, 1, "candidate"), (0, 1, "null"), (1, 2, "candidate"), (1, 2, "null")]
    assert all(row["low"] < np.exp(row["estimate"]) < row["high"] for row in rows)
    # SAME, or nothing where the two estimators disagree about a machine's noise
    assert {row["verdict"] for row in rows if row["role"] == "candidate"} <= {"SAME", "NOT DISTINGUISHABLE"}
    assert record.document["summary"][0]["called_at_most"] == pytest.approx(1 - 0.05 ** (1 / 2))


def test_ctrl_c_keeps_the_finished_runs_and_resume_goes_on_with_them(arms: Callable[..., None]) -> None:
    arms(stop_after=80)
    stderr = call("--runs", "4", *FLAGS, expected=130).stderr
    interrupted = only_record()
    done = len({row["run"] for row in interrupted.row_dicts})

    assert not interrupted.complete
    assert 1 <= done < 4
    assert f"{done} of 4 runs are kept; go on with --resume {interrupted.run_id[:14]}" in stderr

    arms()
    call("--resume", interrupted.run_id, "--runs", "4", *FLAGS)
    whole = next(r for r in list_records([Path("records")]) if r.document.get("supersedes") == [interrupted.run_id])
    candidates = [row for row in whole.row_dicts if (row["metric"], row["role"]) == ("decode", "candidate")]
    assert whole.complete
    assert [(row["run"], row["seed"]) for row in candidates] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [row["estimate"] for row in candidates][:done] == [
        row["estimate"] for row in interrupted.row_dicts if (row["metric"], row["role"]) == ("decode", "candidate")
    ]


def test_ctrl_c_in_the_first_run_leaves_nothing_behind(arms: Callable[..., None]) -> None:
    arms(stop_after=9)

    assert "interrupted before the first run had ended" in call("--runs", "2", *FLAGS, expected=130).stderr
    assert list_records([Path("records")]) == []


@pytest.mark.parametrize("during", ["summarize", "write_parquet"])
def test_ctrl_c_while_the_record_is_summed_up_or_written_leaves_it_whole_and_named(
    arms: Callable[..., None], monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    arms()
    module: Any = calibration if during == "summarize" else writing
    work = getattr(module, during)

    def once(*given: Any) -> Any:
        # not in the record of the run itself, which is kept elsewhere and taken over
        last = during == "summarize" or given[1] == "calibration"
        monkeypatch.setattr(module, during, work if last else once)
        return interrupted_while(work)(*given) if last else work(*given)

    monkeypatch.setattr(module, during, once)
    with ctrl_c_heard():
        answer = call("--runs", "1", *FLAGS, expected=130)
    record = only_record()

    assert record.complete
    assert "decode: 1 A/A runs of 12 observations" in answer.stdout
    assert f"record: records/local/{record.path.name}" in answer.stderr
    assert answer.stderr.endswith("interrupted: the record was whole by then\n")
    assert list(Path("records/local").glob("*.journal")) == []


def test_a_run_whose_record_was_whole_when_ctrl_c_came_is_among_those_kept(
    arms: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms()
    monkeypatch.setattr(writing, "write_parquet", interrupted_while(writing.write_parquet))
    with ctrl_c_heard():
        answer = call("--runs", "2", *FLAGS, expected=130)

    assert "interrupted: 1 of 2 runs are kept; go on with --resume" in answer.stderr
    assert not only_record().complete


def test_runs_that_would_be_others_are_not_put_to_earlier_ones(arms: Callable[..., None]) -> None:
    arms()
    call("--runs", "1", *FLAGS)
    first = only_record().run_id
    flags = [*FLAGS[:-1], "9"]

    arms()
    assert (
        "differ from the earlier ones in history_key"
        in call("--resume", first, "--runs", "2", *flags, expected=2).stderr
    )
    assert "--resume NONE" not in call("--resume", "NONE", "--runs", "2", expected=2).stderr


def test_a_record_of_another_kind_cannot_be_resumed(arms: Callable[..., None], tmp_path: Path) -> None:
    other = run(tmp_path / "records").path.stem
    arms()

    assert f"--resume {other}: a bench record, not a calibration" in call("--resume", other, expected=2).stderr


def test_the_summary_is_there_for_programs(arms: Callable[..., None]) -> None:
    arms()
    value = json.loads(call("--runs", "1", "--json", *FLAGS).stdout)

    assert value["runs"] == 1
    assert value["summary"][0]["metric"] == "decode"
    assert len(value["rows"]) == len(only_record().row_dicts)


def test_a_calibration_gives_later_runs_on_this_machine_their_noise_floor(arms: Callable[..., None]) -> None:
    arms()
    call("--runs", "2", *FLAGS)
    record = only_record()
    hard = record.document["machine"]["hard"]
    nulls = null_history([Path("records")], record.document["history_key"], hard)

    estimates = [row["estimate"] for row in record.row_dicts if (row["metric"], row["role"]) == ("decode", "null")]
    assert nulls["decode"] == estimates
    assert len(nulls["decode"]) == 2
    assert null_history([Path("records")], record.document["history_key"] | {"backend": "other"}, hard) == {}
    assert null_history([Path("records")], record.document["history_key"], {**hard, "memory_gib": 1}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"scenario": "prefill"},
        {"isolation": "process"},
        {"plan": {"backend": "cpu"}},
        {"schedule": [[]] * 18},
        {"starts": 5},
        {"arms": [{"target": "openai_http"}]},
        {"arms": [{"target": "engine", "served_by": "vllm"}]},
        {"arms": [{"target": "engine", "url": "http://host-0123abcd:8000"}]},
        {"plan": {"backend": "reference", "threads": 2}},
        {"workload": {"n_prompt": 512}},
        {"model": {"sha256": "0"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_history_is_keyed_by_all_that_makes_noise_comparable(change: dict[str, Any]) -> None:
    document = {
        "scenario": "decode",
        "isolation": "toggle",
        "plan": {"backend": "reference"},
        "schedule": [[]] * 12,
        "arms": [{"target": "engine"}],
        "workload": {"n_prompt": 128},
        "model": {"sha256": "1"},
    }

    assert history_key({**document, **change}) != history_key(document)
    here = [{"target": "engine", "url": "http://127.0.0.1:40123"}]
    assert history_key({**document, "seed": 3, "arms": here}) == history_key(document)


# -- what is made of the rows ------------------------------------------------------------------------------------------
def rows(words: list[str], nulls: list[float]) -> list[dict[str, Any]]:
    base = {
        "metric": "decode",
        "primary": True,
        "n": 12,
        "sd": 0.01,
        "mde": 0.01,
        "margin": 0.01,
        "low": 0.99,
        "high": 1.01,
    }
    candidates = [{**base, "role": "candidate", "verdict": word, "estimate": 0.002} for word in words]
    return candidates + [{**base, "role": "null", "verdict": None, "estimate": null} for null in nulls]


def test_false_calls_are_counted_among_runs_that_were_judged() -> None:
    [entry] = calibration.summarize(rows(["SAME"] * 37 + ["FASTER", "INVALID", "NOT DISTINGUISHABLE"], [0.01] * 40))

    assert (entry["runs"], entry["judged"], entry["called"], entry["invalid"]) == (40, 39, 1, 1)
    exact = scipy_stats.binomtest(1, 39, alternative="less").proportion_ci(0.95)
    assert entry["called_at_most"] == pytest.approx(exact.high)


def test_the_floor_is_the_90th_percentile_of_the_null_arms() -> None:
    [entry] = calibration.summarize(rows(["SAME"], [0.001 * n * (-1) ** n for n in range(1, 11)]))

    assert entry["floor"] == pytest.approx(np.expm1(0.009))
    assert entry["largest"] == pytest.approx(np.expm1(0.010))


def test_a_run_that_fell_before_it_had_results_is_a_row_too() -> None:
    document = {"seed": 5, "valid": False, "checks": [{"code": "V01", "severity": "run"}], "results": []}

    assert list(calibration.rows_of_run(2, document)) == [
        {"run": 2, "seed": 5, "started_utc": None, "wall_s": None, "valid": False, "broken": "V01"}
    ]


def test_the_time_that_is_left_counts_each_warm_up_once_and_not_for_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a warm-up of 20 s the first slot of 36 foretold ten hours."""
    told: list[Done] = []
    calibration: Any = SimpleNamespace(runs=40, done=0)
    bar: Any = SimpleNamespace(slot_done=told.append)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    counted = Counted(bar, calibration)
    monkeypatch.setattr("time.monotonic", lambda: 121.0)

    counted.slot_done(Done(1, 36, "base", 0, 35.0, ""))

    assert told[0].left_s == 35 + 39 * (20 + 36)
    assert (told[0].slots, told[0].total) == (1, 40 * 36)
