"""Figures of other tools as records of kind `imported`: what `vllm bench serve` saves and what llama-bench prints.

They are kept beside our runs, to be looked at; nothing in them is interleaved, so they never carry a verdict.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pocketllm.errors import RecordError

VLLM, LLAMA_BENCH = "vllm-bench", "llama-bench"
MAX_BYTES = 256 * 2**20
STATISTIC = re.compile(r"(?P<statistic>mean|median|std|p\d+(?:\.\d+)?)_(?P<metric>[a-z0-9]+)_ms")
VLLM_RATES = {
    "request_throughput": "req/s",
    "request_goodput": "req/s",
    "output_throughput": "tok/s",
    "total_token_throughput": "tok/s",
}
VLLM_FACTS = ("backend", "model_id", "tokenizer_id", "label", "request_rate", "burstiness", "max_concurrency", "date")
LLAMA_FACTS = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
    *("model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "flash_attn"),
)

Rows = list[dict[str, Any]]


def read_results(path: Path, source: str | None = None) -> list[tuple[dict[str, Any], Rows]]:
    """(document, rows) of each record that a results file makes; RecordError says what is wrong with it.

    `source` None: found out from the keys. A llama-bench file makes one record a model, a vLLM file one a run.
    """
    entries = list(objects(path))
    if not entries:
        raise RecordError(f"{path.name} holds no results")
    found = source or source_of(path, entries[0])
    if found not in READERS:
        raise RecordError(f"no importer for {found!r}; known: {', '.join(READERS)}")
    try:
        return READERS[found](entries)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{path.name} is no {found} result: {told(error)}") from error


def told(error: Exception) -> str:
    """A missing key by its name, anything else in its own words."""
    return f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


def objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """JSON objects of a file: one, a list, or one a line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB: is this a results file?")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RecordError(f"no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read {path.name}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    values: Sequence[Any]
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [whole]
    except RecursionError as error:
        raise RecordError(f"{path.name} is nested too deep for a results file") from error
    except ValueError:
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise RecordError(f"{path.name} is neither JSON nor JSON lines: {error}") from error
    for value in values:
        if not isinstance(value, dict):
            raise RecordError(f"{path.name} holds a {type(value).__name__} where an object was expected")
        yield value


def source_of(path: Path, entry: Mapping[str, Any]) -> str:
    """Which tool wrote it, by its keys."""
    if "avg_ts" in entry and "n_prompt" in entry:
        return LLAMA_BENCH
    if "total_output_tokens" in entry and "duration" in entry:
        return VLLM
    raise RecordError(f"{path.name} is of no known tool; known: {', '.join(READERS)} (say which with --from)")


# -- vllm bench serve --------------------------------------------------------------------------------------------------
def vllm(entries: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], Rows]]:
    """One record a saved run."""
    return [({"source": VLLM, "imported": facts_of(entry, VLLM_FACTS)}, list(vllm_rows(entry))) for entry in entries]


def vllm_rows(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a figure: rates, totals, and each statistic of each latency, in seconds; single latencies where saved."""
    completed = int(entry["completed"])
    shared = {
        "source": VLLM,
        "test": f"{completed} requests",
        "n": completed,
        "n_prompt": int(entry["total_input_tokens"]),
        "n_out": int(entry["total_output_tokens"]),
        "concurrency": None if entry.get("max_concurrency") is None else int(entry["max_concurrency"]),
    }
    yield {**shared, "metric": "duration", "unit": "s", "statistic": "total", "value": float(entry["duration"])}
    for name, unit in VLLM_RATES.items():
        if entry.get(name) is not None:
            yield {**shared, "metric": name, "unit": unit, "statistic": "total", "value": float(entry[name])}
    for key, value in entry.items():
        found = STATISTIC.fullmatch(key)
        if found and value is not None:
            figure = {
                "metric": found["metric"],
                "statistic": found["statistic"],
                "unit": "s",
                "value": float(value) / 1e3,
            }
            yield {**shared, **figure}
    if entry.get("ttfts"):
        yield {**shared, "metric": "ttft", "unit": "s", "samples": [float(value) for value in entry["ttfts"]]}


# -- llama-bench -------------------------------------------------------------------------------------------------------
def llama_bench(entries: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], Rows]]:
    """One record a model file and build; a row a test."""
    grouped: dict[str, tuple[dict[str, Any], Rows]] = {}
    for entry in entries:
        facts = facts_of(entry, LLAMA_FACTS)
        key = json.dumps(facts, sort_keys=True)
        grouped.setdefault(key, ({"source": LLAMA_BENCH, "imported": facts}, []))[1].extend(llama_rows(entry))
    return list(grouped.values())


def llama_rows(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Mean and standard deviation of tokens per second, with the repetitions where the build prints them."""
    n_prompt, n_gen, depth = (int(entry.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
    words = [f"pp{n_prompt}" * bool(n_prompt), f"tg{n_gen}" * bool(n_gen)]
    samples = [float(value) for value in entry.get("samples_ts") or ()]
    shared = {
        "source": LLAMA_BENCH,
        "test": "+".join(filter(None, words)) + f" @ d{depth}" * bool(depth),
        "metric": "prefill" if not n_gen else "decode" if not n_prompt else "prefill+decode",
        "unit": "tok/s",
        "n": len(samples) or None,
        "n_prompt": n_prompt,
        "n_out": n_gen,
        "concurrency": 1,
    }
    yield {**shared, "statistic": "mean", "value": float(entry["avg_ts"]), "samples": samples or None}
    yield {**shared, "statistic": "std", "value": float(entry["stddev_ts"])}


def facts_of(entry: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the named facts that an entry tells, a model's path as its file name."""
    found = {name: entry[name] for name in names if entry.get(name) not in (None, "")}
    return {name: Path(str(value)).name if name == "model_filename" else value for name, value in found.items()}


READERS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], list[tuple[dict[str, Any], Rows]]]] = {
    VLLM: vllm,
    LLAMA_BENCH: llama_bench,
}
