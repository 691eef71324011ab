"""A bench record in the formats of other tools, for scripts that read those: llama-bench JSON lines, vLLM's JSON.

Only single arms fit such a format, so what makes a run worth believing stays behind: pairing, intervals, the null arm
and the verdict. Each entry names the record it came from.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from pocketllm.bench import latency
from pocketllm.bench.latency import Timing
from pocketllm.errors import OptionError

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

NOTE = "interleaved slots of one run, pooled: no interval and no verdict here; see the record"


def measured_of(rows: Rows, arm: str) -> list[Mapping[str, Any]]:
    """The measured requests of one arm that succeeded."""
    return [row for row in rows if row["arm"] == arm and row["phase"] == "measure" and row["error"] is None]


def origin(document: Document, arm: Mapping[str, Any]) -> dict[str, Any]:
    """Where an entry came from."""
    return {"run_id": document.get("run_id"), "arm": arm["name"], "arm_role": arm.get("role"), "note": NOTE}


# -- llama-bench -------------------------------------------------------------------------------------------------------
LLAMA_SETTINGS = (
    *("n_batch", "n_ubatch", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe"),
    *("split_mode", "main_gpu", "no_kv_offload", "flash_attn", "tensor_split", "tensor_buft_overrides", "use_mmap"),
    *("embeddings", "no_op_offload", "fit_target", "fit_min_ctx"),
)
"""Settings of its own that llama.cpp's compare-llama-bench.py asks every line for; empty, since nothing here has them
(null would not do: it joins two builds on equal values)."""


def llama_bench(document: Document, rows: Rows) -> list[dict[str, Any]]:
    """Two entries an arm, where it has them: prompt processing, and generation at the depth of that prompt."""
    entries = []
    for arm in document["arms"]:
        requests = measured_of(rows, arm["name"])
        shared = llama_facts(document, arm)
        for lengths, group in groupby(sorted(requests, key=lengths_of), key=lengths_of):
            timings = [Timing.of_row(row) for row in group]
            n_prompt, n_out = lengths
            prefills = [cost for one in timings if (cost := latency.prefill_s(one))]
            tpots = [cost for one in timings if (cost := latency.tpot_s(one))]
            if prefills:
                entries.append({**shared, **llama_test(prefills, n_prompt, n_prompt, 0, 0)})
            if tpots:
                entries.append({**shared, **llama_test(tpots, n_out, 0, n_out, n_prompt)})
    if not entries:
        raise OptionError(f"record {document.get('run_id')} has no measured requests to export")
    return entries


def lengths_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and output tokens of a request."""
    return int(row["n_prompt"] or 0), int(row["n_out"] or 0)


def llama_facts(document: Document, arm: Mapping[str, Any]) -> dict[str, Any]:
    """What llama-bench says of build, machine and model, as far as the record knows it."""
    hard, plan = (document.get("machine") or {}).get("hard") or {}, arm.get("plan") or {}
    model = document.get("model") or {}
    # a server's build is its own: what measured it says nothing about it
    code = arm.get("code") or (document.get("code") if arm.get("target") == "engine" else None) or {}
    quants = [name for name in model.get("quant_types") or () if name != "F32"]
    return {
        **dict.fromkeys(LLAMA_SETTINGS, ""),
        "build_commit": str(code.get("commit") or "")[:8],
        "build_number": 0,
        "cpu_info": hard.get("cpu", ""),
        "gpu_info": ", ".join(hard.get("gpus") or ()),
        "backends": plan.get("backend") or arm.get("served_by") or "",
        "model_filename": model.get("name", ""),
        "model_type": " ".join(filter(None, (str(model.get("architecture") or ""), "+".join(quants)))),
        "n_threads": plan.get("threads") or (plan.get("options") or {}).get("threads") or "",
        "test_time": document.get("started_utc"),
        "pocketllm": origin(document, arm),
    }


def llama_test(costs: Sequence[float], tokens: int, n_prompt: int, n_gen: int, depth: int) -> dict[str, Any]:
    """Repetitions of one test from seconds per token."""
    nanoseconds = [round(cost * tokens * 1e9) for cost in costs]
    rates = [1 / cost for cost in costs]
    return {
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": depth,
        "avg_ns": round(statistics.fmean(nanoseconds)),
        "stddev_ns": round(statistics.stdev(nanoseconds)) if len(nanoseconds) > 1 else 0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples_ns": nanoseconds,
        "samples_ts": rates,
    }


# -- vLLM --------------------------------------------------------------------------------------------------------------
LATENCIES: Mapping[str, Callable[[Timing], float | None]] = {
    "ttft": latency.ttft_s,
    "tpot": latency.tpot_s,
    "e2el": latency.e2el_s,
}


def vllm_json(document: Document, rows: Rows) -> list[dict[str, Any]]:
    """One entry an arm, with the keys that `vllm bench serve --save-result --save-detailed` writes."""
    failed = Counter(row["arm"] for row in rows if row["phase"] == "measure" and row["error"] is not None)
    entries = [
        vllm_entry(document, arm, measured_of(rows, arm["name"]), failed[arm["name"]]) for arm in document["arms"]
    ]
    if not any(entry["completed"] for entry in entries):
        raise OptionError(f"record {document.get('run_id')} has no measured requests to export")
    return entries


def vllm_entry(document: Document, arm: Mapping[str, Any], rows: Rows, num_failed: int) -> dict[str, Any]:
    """One arm; the duration is the sum of its slots' windows, between which other arms ran."""
    timings = [Timing.of_row(row) for row in rows]
    slots: dict[tuple[Any, Any], list[Timing]] = {}
    for row, timing in zip(rows, timings, strict=True):
        slots.setdefault((row["slot"], row.get("point")), []).append(timing)
    duration = sum(latency.window_s(slot) or 0.0 for slot in slots.values())
    n_in, n_out = (sum(getattr(one, name) or 0 for one in timings) for name in ("n_prompt", "n_out"))
    gaps = [latency.gaps_s(one) for one in timings]
    points = (document.get("workload") or {}).get("points") or ()
    rates = [point["rate_per_s"] for point in points if point.get("rate_per_s")]
    found = {
        "date": str(document.get("started_utc")),
        "endpoint_type": arm.get("served_by") or arm.get("target"),
        "backend": arm.get("served_by") or arm.get("target"),
        "model_id": (document.get("model") or {}).get("name"),
        "num_prompts": len(timings) + num_failed,
        "request_rate": max(rates, default="inf"),
        "max_concurrency": max((int(row.get("offered") or 1) for row in rows), default=1),
        "duration": duration,
        "completed": len(timings),
        "failed": num_failed,
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(timings) / duration if duration else None,
        "output_throughput": n_out / duration if duration else None,
        "total_token_throughput": (n_in + n_out) / duration if duration else None,
        "input_lens": [one.n_prompt for one in timings],
        "output_lens": [one.n_out for one in timings],
        "ttfts": [latency.ttft_s(one) for one in timings],
        "itls": gaps,
    }
    for name, word in LATENCIES.items():
        found |= vllm_statistics(name, [value for one in timings if (value := word(one)) is not None])
    found |= vllm_statistics("itl", [gap for some in gaps for gap in some])
    return found | {"pocketllm": origin(document, arm)}


def vllm_statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile in milliseconds; absent without a value."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.quantile(values, 0.99)),
    }
