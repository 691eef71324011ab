"""Columns of a run record's rows, by kind, with their types and units.

A row is one request (bench), one check of one case (golden), one comparison (parity), one tensor (inspect), one model
on one device class (ladder), one contrast of one run (calibration), one figure of another tool (imported) or one second
of a server under load (soak).
"""

from collections.abc import Mapping

COMMON_COLUMNS: Mapping[str, str] = {"run_id": "string", "schema": "string", "kind": "string"}
"""Columns of every row; the writer fills them."""

BENCH_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "arm": "string",
    "arm_role": "string",  # baseline, candidate, null
    "arm_sha256": "string",
    "start": "int32",
    "superblock": "int32",
    "block": "int32",
    "slot": "int32",
    "position": "int32",
    "prev_arm": "string",
    "phase": "string",  # warmup, soak, burnin, measure
    "request": "int32",
    "prompt_id": "string",
    "prompt_sha256": "string",
    "n_prompt": "int32",
    "n_cached": "int32",
    "n_out": "int32",
    "t_sched_ns": "int64",
    "t_send_ns": "int64",
    "t_first_ns": "int64",
    "t_first_content_ns": "int64",
    "t_last_ns": "int64",
    "chunk_t_ns": "list<int64>",
    "chunk_ntok": "list<int32>",
    "srv_prefill_s": "double",
    "srv_decode_s": "double",
    "srv_queue_s": "double",
    "finish": "string",
    "http_status": "int32",
    "error": "string",
    "out_ids_sha256": "string",
    "loop_lag_ms": "double",
    "gpu_clk_sm": "double",  # MHz
    "gpu_clk_mem": "double",  # MHz
    "gpu_temp": "double",  # degrees Celsius
    "gpu_power": "double",  # watts
    "throttle_mask": "int64",
    "cpu_freq": "double",  # MHz
    "rss": "int64",  # bytes
    "vram": "int64",  # bytes
    "point": "string",  # label of the scenario's point
    "offered": "int32",  # requests that the slot was to keep in flight
    "compiles": "int32",  # compilations and graph captures inside the request's window
    "srv_running": "double",  # requests that the server computed at a time, by its own gauge
}
GOLDEN_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "case": "string",
    "fixture_sha256": "string",
    "entry_point": "string",  # http_chat, http_completions, in_process, generate
    "check": "string",  # tokens, scored, cancel, shutdown
    "stream": "bool",
    "concurrency": "int32",
    "outcome": "string",
    "position": "int32",  # of the first divergence, in output tokens
    "margin": "double",  # nats
    "regret": "double",  # nats, infinite when the served token is outside the recorded ones
    "dlogprob_mean": "double",
    "dlogprob_p99": "double",
    "n_prompt": "int32",
    "n_cached": "int32",
    "n_out": "int32",
    "detail": "string",
    "ttft_s": "double",
    "e2el_s": "double",
}
PARITY_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "subject": "string",
    "oracle": "string",
    "oracle_version": "string",
    "inputs_sha256": "string",
    "n": "int64",
    "max_error": "double",
    "mean_error": "double",
    "nmse": "double",
    "top1": "double",
    "kl": "double",
    "tolerance": "double",
    "passed": "bool",
    "detail": "string",
}
INSPECT_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "tensor": "string",
    "quant_type": "string",
    "shape": "list<int64>",
    "num_bytes": "int64",
}
LADDER_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "model": "string",
    "architecture": "string",
    "model_sha256": "string",
    "device_class": "string",
    "rung": "int32",
    "freshness": "string",
    "missing": "string",
    "proofs": "list<string>",
}
CALIBRATION_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "run": "int32",  # from 0
    "seed": "int64",
    "started_utc": "string",
    "wall_s": "double",
    "valid": "bool",
    "broken": "string",  # validity codes that made the run INVALID
    "metric": "string",
    "arm": "string",
    "role": "string",  # candidate (the baseline again, judged) or null
    "n": "int32",
    "n_unit": "string",  # block, start
    "estimate": "double",  # ln time ratio
    "se": "double",
    "df": "int32",
    "low": "double",  # 95 % interval of the time ratio
    "high": "double",
    "p_value": "double",
    "sd": "double",
    "floor": "double",  # relative
    "mde": "double",  # relative
    "margin": "double",  # relative
    "primary": "bool",
    "verdict": "string",  # of the candidate on a judged metric
    "reason": "string",
}
IMPORTED_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "source": "string",  # vllm-bench, llama-bench
    "test": "string",  # what was asked, in the source's words
    "metric": "string",
    "unit": "string",
    "statistic": "string",  # mean, median, std, p99, total, or empty for a single value
    "value": "double",
    "n": "int64",  # observations behind it
    "n_prompt": "int64",
    "n_out": "int64",
    "concurrency": "int64",
    "samples": "list<double>",
}
SOAK_COLUMNS: Mapping[str, str] = {
    **COMMON_COLUMNS,
    "t_s": "double",  # since the clients began
    "rss": "int64",  # bytes, of the server
    "n_requests": "int64",  # begun until then
    "n_tokens": "int64",
    "n_faults": "int64",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "bench": BENCH_COLUMNS,
    "golden": GOLDEN_COLUMNS,
    "parity": PARITY_COLUMNS,
    "inspect": INSPECT_COLUMNS,
    "ladder": LADDER_COLUMNS,
    "calibration": CALIBRATION_COLUMNS,
    "imported": IMPORTED_COLUMNS,
    "soak": SOAK_COLUMNS,
}
