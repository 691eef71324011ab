"""In and out: figures of vLLM bench and llama-bench as records, and bench records in their formats and as JUnit."""

import json
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pocketllm.bench.reports import export
from pocketllm.cli.main import app
from pocketllm.errors import RecordError
from pocketllm.evidence.imports import read_results
from pocketllm.evidence.store import read_record
from tests.unit.test_records_query import bench, golden

RUNNER = CliRunner()

LLAMA_BENCH = """\
{"build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU", \
"model_filename": "/models/SmolLM2-135M-Instruct.Q4_1.gguf", "model_type": "llama 256M Q4_1", "model_size": 96576768, \
"model_n_params": 134515008, "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0", "cpu_strict": false, \
"poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer", \
"flash_attn": -1, "n_prompt": 16, "n_gen": 0, "n_depth": 0, "test_time": "2026-11-29T23:59:15Z", "avg_ns": 34886980, \
"stddev_ns": 2307183, "avg_ts": 459.628932, "stddev_ts": 30.396676, "samples_ns": [ 36518405, 33255555 ],\
"samples_ts": [ 438.135, 481.123 ]}
{"build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU", \
"model_filename": "/models/SmolLM2-135M-Instruct.Q4_1.gguf", "model_type": "llama 256M Q4_1", "model_size": 96576768, \
"model_n_params": 134515008, "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0", "cpu_strict": false, \
"poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer", \
"flash_attn": -1, "n_prompt": 0, "n_gen": 8, "n_depth": 512, "test_time": "2026-11-29T23:59:15Z", "avg_ns": 36772604, \
"stddev_ns": 1479264, "avg_ts": 217.729424, "stddev_ts": 8.758532, "samples_ns": [ 37818585, 35726624 ],\
"samples_ts": [ 211.536, 223.923 ]}
"""
"""What llama-bench -p 16 -n 8 -r 2 -o jsonl printed; folder shortened, some keys left out, one depth changed."""

VLLM = {
    "date": "20261129-235915",
    "endpoint_type": "openai",
    "backend": "vllm",
    "model_id": "org/model",
    "num_prompts": 4,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 2,
    "duration": 2.0,
    "completed": 4,
    "failed": 0,
    "total_input_tokens": 400,
    "total_output_tokens": 64,
    "request_goodput": None,
    "request_throughput": 2.0,
    "output_throughput": 32.0,
    "total_token_throughput": 232.0,
    "mean_ttft_ms": 80.5,
    "median_ttft_ms": 80.0,
    "std_ttft_ms": 2.0,
    "p99_ttft_ms": 84.0,
    "p99.9_e2el_ms": 300.0,
    "median_tpot_ms": 12.5,
    "median_itl_ms": 12.0,
    "ttfts": [0.08, 0.081, 0.079, 0.082],
    "generated_texts": ["a"] * 4,
}


def write(folder: Path, text: str, name: str = "results.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def call(folder: Path, *words: str, expected: int = 0) -> Any:
    result = RUNNER.invoke(app, ["records", *words, "--record-dir", str(folder)], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


# -- in ----------------------------------------------------------------------------------------------------------------
def test_llama_bench_lines_become_one_record_a_model_with_a_row_a_figure(tmp_path: Path) -> None:
    [(document, rows)] = read_results(write(tmp_path, LLAMA_BENCH))

    assert document["source"] == "llama-bench"
    assert document["imported"]["model_filename"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    told = [(row["test"], row["metric"], row["statistic"], row["value"], row["n"]) for row in rows]
    assert told == [
        ("pp16", "prefill", "mean", 459.628932, 2),
        ("pp16", "prefill", "std", 30.396676, 2),
        ("tg8 @ d512", "decode", "mean", 217.729424, 2),
        ("tg8 @ d512", "decode", "std", 8.758532, 2),
    ]
    assert rows[0]["samples"] == [438.135, 481.123]


def test_what_vllm_saved_becomes_rates_and_latencies_in_seconds(tmp_path: Path) -> None:
    [(document, rows)] = read_results(write(tmp_path, json.dumps(VLLM)))

    assert document == {
        "source": "vllm-bench",
        "imported": {
            "backend": "vllm",
            "model_id": "org/model",
            "request_rate": "inf",
            "burstiness": 1.0,
            "max_concurrency": 2,
            "date": "20261129-235915",
        },
    }
    found = {(row["metric"], row.get("statistic")): row.get("value") for row in rows}
    assert found["ttft", "median"] == pytest.approx(0.08)
    assert found["e2el", "p99.9"] == pytest.approx(0.3)
    assert found["output_throughput", "total"] == 32.0
    assert ("request_goodput", "total") not in found
    assert {row["concurrency"] for row in rows} == {2}
    assert rows[-1]["samples"] == VLLM["ttfts"]


def test_an_imported_record_is_listed_shown_and_never_judged(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA_BENCH, "llama.jsonl")
    run_id = call(tmp_path, "import", str(path)).stdout.strip()

    assert read_record(run_id, [tmp_path]).kind == "imported"
    assert "4 figures of llama-bench, no verdict" in call(tmp_path, "ls").stdout
    page = call(tmp_path, "show", run_id).stdout
    assert "Figures of another tool (never a verdict)" in page
    assert "tg8 @ d512" in page
    assert "None" not in page  # no file of llama-bench tells a device as ours are told
    assert not any(word in page for word in ("FASTER", "SLOWER", "SAME"))
    assert call(tmp_path, "verify", run_id).stdout.startswith("whole")


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("", None, "holds no results|neither JSON nor JSON lines"),
        ("{", None, "neither JSON nor JSON lines"),
        ("[1]", None, "holds a int where an object was expected"),
        ('{"tokens": 3}', None, "of no known tool; known: vllm-bench, llama-bench"),
        ('{"tokens": 3}', "vllm-bench", "is no vllm-bench result: it has no 'completed'"),
        ('{"avg_ts": "fast", "n_prompt": 1, "stddev_ts": 0}', None, "is no llama-bench result: could not convert"),
        ('{"avg_ts": 1, "n_prompt": 1e999, "stddev_ts": 0}', None, "is no llama-bench result: cannot convert"),
        ("[" * 100_000, None, "nested too deep"),
        (LLAMA_BENCH, "sglang", "no importer for 'sglang'"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_a_sentence(
    tmp_path: Path, text: str, source: str | None, message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        read_results(write(tmp_path, text), source)


def test_nothing_is_written_when_one_of_several_files_is_bad(tmp_path: Path) -> None:
    good, bad = write(tmp_path, LLAMA_BENCH, "good.jsonl"), write(tmp_path, "{", "bad.json")

    assert "bad.json" in call(tmp_path, "import", str(good), str(bad), expected=2).stderr
    assert "no file" in call(tmp_path, "import", "nowhere.json", expected=2).stderr
    assert list(tmp_path.glob("*.parquet")) == []


# -- out ---------------------------------------------------------------------------------------------------------------
def test_llama_bench_lines_hold_each_arm_and_come_back_in(tmp_path: Path) -> None:
    run_id = bench(tmp_path).stem
    lines = call(tmp_path, "export", run_id, "--to", "llama-bench").stdout

    entries = [json.loads(line) for line in lines.splitlines()]
    told = [(e["pocketllm"]["arm"], e["n_prompt"], e["n_gen"], e["n_depth"], round(e["avg_ts"])) for e in entries]
    # 10 prompt tokens in 100 ms, then 10 ms a token at that depth; the failed request of b is left out
    assert told == [("base", 10, 0, 0, 100), ("base", 0, 5, 10, 100), ("b", 10, 0, 0, 100), ("b", 0, 5, 10, 100)]
    assert [len(entry["samples_ts"]) for entry in entries] == [2, 2, 1, 1]
    rows = [row for _, rows in read_results(write(tmp_path, lines, "again.jsonl")) for row in rows]
    assert {row["value"] for row in rows if row["statistic"] == "mean"} == {entry["avg_ts"] for entry in entries}


COMPARED_BY_LLAMA_CPP = {
    *("cpu_info", "gpu_info", "backends", "n_gpu_layers", "n_cpu_moe", "tensor_buft_overrides", "model_filename"),
    *("model_type", "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict", "poll", "n_threads", "type_k"),
    *("type_v", "use_mmap", "no_kv_offload", "split_mode", "main_gpu", "tensor_split", "flash_attn", "n_prompt"),
    *("n_gen", "n_depth", "fit_target", "fit_min_ctx", "build_commit", "test_time", "avg_ts"),
}
"""What scripts/compare-llama-bench.py of llama.cpp refuses a line without; it joins builds where these are equal."""


def test_llama_bench_lines_have_every_key_that_its_own_comparison_asks_for(tmp_path: Path) -> None:
    lines = call(tmp_path, "export", bench(tmp_path).stem, "--to", "llama-bench").stdout.splitlines()

    for entry in map(json.loads, lines):
        assert entry.keys() >= COMPARED_BY_LLAMA_CPP
        assert None not in [entry[key] for key in COMPARED_BY_LLAMA_CPP]


def test_an_arm_is_told_with_its_own_build_and_never_with_that_of_the_tool_that_measured_it(tmp_path: Path) -> None:
    arms = [
        {"name": "base", "role": "baseline", "target": "engine"},
        {"name": "b", "role": "candidate", "target": "openai_http", "served_by": "llama-server"},
        {"name": "c", "role": "candidate", "target": "openai_http", "code": {"commit": "c" * 40}},
    ]
    facts = [export.llama_facts({"code": {"commit": "a" * 40}}, arm) for arm in arms]

    assert [fact["build_commit"] for fact in facts] == ["a" * 8, "", "c" * 8]


def test_vllm_json_counts_requests_that_failed(tmp_path: Path) -> None:
    run_id = bench(tmp_path).stem
    entry = json.loads(call(tmp_path, "export", run_id, "--to", "vllm-json", "--arm", "b").stdout)

    assert (entry["num_prompts"], entry["completed"], entry["failed"], entry["request_rate"]) == (2, 1, 1, "inf")


def test_junit_holds_contrasts_and_so_no_single_arm(tmp_path: Path) -> None:
    run_id = bench(tmp_path, nulls=True).stem

    stderr = call(tmp_path, "export", run_id, "--to", "junit", "--arm", "b", expected=2).stderr
    assert "junit tells of arms against the baseline: leave --arm out" in stderr


def test_vllm_json_has_the_figures_of_the_arm_asked_for(tmp_path: Path) -> None:
    run_id = bench(tmp_path).stem
    entry = json.loads(call(tmp_path, "export", run_id, "--to", "vllm-json", "--arm", "base").stdout)

    assert (entry["completed"], entry["total_input_tokens"], entry["total_output_tokens"]) == (2, 20, 10)
    assert entry["median_ttft_ms"] == pytest.approx(100)
    assert entry["mean_tpot_ms"] == pytest.approx(10)
    assert entry["median_itl_ms"] == pytest.approx(10)
    assert entry["duration"] == pytest.approx(0.64)  # one slot, from the first send to the last chunk
    assert entry["mean_ttft_ms"] == pytest.approx(1e3 * statistics.fmean(entry["ttfts"]))
    assert "no interval and no verdict" in entry["pocketllm"]["note"]
    [(_, rows)] = read_results(write(tmp_path, json.dumps(entry)))
    assert any(row["metric"] == "tpot" and row["statistic"] == "p99" for row in rows)


def test_junit_keeps_the_verdict(tmp_path: Path) -> None:
    run_id = bench(tmp_path, nulls=True).stem
    suite = ElementTree.fromstring(call(tmp_path, "export", run_id, "--to", "junit").stdout.encode())

    assert (suite.tag, suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("testsuite", "1", "1", "0")
    [failure] = suite.iter("failure")
    assert failure.get("message") == "SLOWER"


def test_an_export_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run_id, other = bench(tmp_path).stem, golden(tmp_path).stem

    assert "--to 'csv': known is llama-bench" in call(tmp_path, "export", run_id, "--to", "csv", expected=2).stderr
    assert "of kind golden" in call(tmp_path, "export", other, "--to", "junit", expected=2).stderr
    stderr = call(tmp_path, "export", run_id, "--to", "llama-bench", "--arm", "x", expected=2).stderr
    assert "--arm 'x' is not in this record; arms: base, b" in stderr
