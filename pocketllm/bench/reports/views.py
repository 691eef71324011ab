"""`--as TOOL`: what other tools call by the same names, recomputed from a record's stamps and printed beside ours.

Each entry states a definition in our words, after the tool's own source or reference; a view measures nothing, so it
differs from the tool itself by whatever its client does otherwise (other lengths, another schedule, another transport).
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.bench import latency
from pocketllm.bench.latency import Timed
from pocketllm.bench.reports.series import Series
from pocketllm.errors import OptionError

Requests = Sequence[Timed]


@dataclass(frozen=True)
class Entry:
    """One number of a tool. `ours`: our word for the nearest thing, with its own definition; None: we have none."""

    name: str
    unit: str
    definition: str
    value: Callable[[Requests], float | None]
    ours: str | None = None


def values_of(word: Callable[[Timed], float | None], requests: Requests) -> list[float]:
    """A word of every request that has it."""
    return [value for request in requests if (value := word(request)) is not None]


def mean_ms(word: Callable[[Timed], float | None]) -> Callable[[Requests], float | None]:
    """Mean over requests, in milliseconds."""

    def value(requests: Requests) -> float | None:
        found = values_of(word, requests)
        return 1e3 * statistics.fmean(found) if found else None

    return value


def mean_gap_ms(requests: Requests) -> float | None:
    """Mean of all chunk gaps of all requests."""
    gaps = [gap for request in requests for gap in latency.gaps_s(request)]
    return 1e3 * statistics.fmean(gaps) if gaps else None


def mean_token_gap_ms(requests: Requests) -> float | None:
    """Mean of chunk gaps, each divided by its chunk's tokens and counted once a token."""
    spread = [
        gap / count
        for request in requests
        for gap, count in zip(latency.gaps_s(request), counts_of(request)[1:], strict=False)
        for _ in range(count)
        if count
    ]
    return 1e3 * statistics.fmean(spread) if spread else None


def counts_of(request: Timed) -> list[int]:
    """Tokens of each chunk; one each where nobody says."""
    return list(request.chunk_ntok) or [1] * len(request.chunk_t_ns)


def whole_tpot_s(request: Timed) -> float | None:
    """(last chunk − send) / n_out: the first token's wait included."""
    e2el = latency.e2el_s(request)
    return e2el / request.n_out if e2el is not None and request.n_out else None


def output_rate(requests: Requests) -> float | None:
    """Output tokens of all requests over the window."""
    window = latency.window_s(requests)
    return sum(request.n_out for request in requests) / window if window else None


def request_rate(requests: Requests) -> float | None:
    """Requests over the window."""
    window = latency.window_s(requests)
    return len(requests) / window if window else None


def prompt_rate(requests: Requests) -> float | None:
    """Mean over requests of prompt tokens a second, from the start of the work to the first token."""
    rates = [1 / cost for cost in values_of(latency.prefill_s, requests) if cost > 0]
    return statistics.fmean(rates) if rates else None


def generation_rate(requests: Requests) -> float | None:
    """Mean over requests of tokens a second after the first one."""
    rates = [1 / cost for cost in values_of(latency.tpot_s, requests) if cost > 0]
    return statistics.fmean(rates) if rates else None


VIEWS: Mapping[str, tuple[Entry, ...]] = {
    "vllm": (
        Entry(
            "Mean TTFT", "ms", "send → first chunk of any kind, mean over requests", mean_ms(latency.ttft_any_s), "ttft"
        ),
        Entry(
            "Mean TPOT", "ms", "(last − first chunk) / (n_out − 1), mean over requests", mean_ms(latency.tpot_s), "tpot"
        ),
        Entry("Mean ITL", "ms", "every gap between chunks, pooled, however many tokens they hold", mean_gap_ms, "itl"),
        Entry("Mean E2EL", "ms", "send → last chunk, mean over requests", mean_ms(latency.e2el_s), "e2el"),
        Entry("Request throughput", "req/s", "requests / window", request_rate, "request_throughput"),
        Entry("Output token throughput", "tok/s", "output tokens / window", output_rate, "throughput"),
    ),
    "sglang": (
        Entry(
            "Mean TTFT", "ms", "send → first chunk with content, mean over requests", mean_ms(latency.ttft_s), "ttft"
        ),
        Entry(
            "Mean TPOT", "ms", "(last − first chunk) / (n_out − 1), mean over requests", mean_ms(latency.tpot_s), "tpot"
        ),
        Entry(
            "Mean ITL", "ms", "each chunk gap split evenly over its tokens, pooled by token", mean_token_gap_ms, "itl"
        ),
        Entry("Mean E2E latency", "ms", "send → last chunk, mean over requests", mean_ms(latency.e2el_s), "e2el"),
        Entry("Output token throughput", "tok/s", "output tokens / window", output_rate, "throughput"),
        Entry("Concurrency", "requests", "sum of all E2E latencies / window", latency.achieved_concurrency),
    ),
    "guidellm": (
        Entry("TTFT", "ms", "start → first token of any kind, mean over requests", mean_ms(latency.ttft_any_s), "ttft"),
        Entry(
            "TPOT", "ms", "(last token − start) / n_out: the first token's wait included", mean_ms(whole_tpot_s), "tpot"
        ),
        Entry("ITL", "ms", "(last − first token) / (n_out − 1): one value a request", mean_ms(latency.tpot_s), "itl"),
        Entry("Request latency", "ms", "start → end, mean over requests", mean_ms(latency.e2el_s), "e2el"),
        Entry("Output tokens per second", "tok/s", "output tokens / window", output_rate, "throughput"),
    ),
    "aiperf": (
        Entry(
            "Time to first token", "ms", "send → first chunk that is not empty, mean", mean_ms(latency.ttft_s), "ttft"
        ),
        Entry(
            "Time to second token",
            "ms",
            "first → second chunk, mean over requests",
            mean_ms(latency.first_decode_s),
            "first_decode",
        ),
        Entry(
            "Inter token latency",
            "ms",
            "(latency − TTFT) / (n_out − 1): one value a request",
            mean_ms(latency.tpot_s),
            "itl",
        ),
        Entry("Inter chunk latency", "ms", "every gap between chunks, pooled", mean_gap_ms, "itl"),
        Entry("Request latency", "ms", "send → last chunk, mean over requests", mean_ms(latency.e2el_s), "e2el"),
        Entry("Output token throughput", "tok/s", "output tokens / window", output_rate, "throughput"),
    ),
    "llama-bench": (
        Entry(
            "pp",
            "tok/s",
            "prompt tokens / time of the prompt alone: mean of rates, without sampling",
            prompt_rate,
            "prefill",
        ),
        Entry(
            "tg",
            "tok/s",
            "tokens / time of generating them from an empty context: mean of rates",
            generation_rate,
            "decode",
        ),
    ),
}
POOLED = "pools the requests of a whole run; here each slot is a run, and the median over blocks is shown."
CAVEATS: Mapping[str, str] = {
    "vllm": f"vLLM's client {POOLED}",
    "sglang": f"SGLang's client {POOLED}",
    "guidellm": f"GuideLLM {POOLED}",
    "aiperf": f"AIPerf {POOLED}",
    "llama-bench": "llama-bench times no server, tokenizer or sampling, and generates after no prompt; these requests "
    "had all of that, so the rates are a lower bound of its own.",
}


def find_view(name: str) -> tuple[Entry, ...]:
    """The entries of a tool; OptionError lists the known ones."""
    if name not in VIEWS:
        raise OptionError(f"--as {name!r}: known are {', '.join(VIEWS)}")
    return VIEWS[name]


def view(series: Series, name: str) -> list[dict[str, Any]]:
    """A tool's numbers for every point and arm, ours beside them: a JSON-able row an entry.

    A number is computed in each slot, as the tool would over one run, and the median over blocks is given.
    """
    rows = []
    for point in series.points:
        for entry in find_view(name):
            for arm in series.arms:
                theirs = over_slots(series, point, arm, entry.value)
                if theirs is not None:
                    rows.append(
                        {**as_row(entry, point, arm), "value": theirs, **ours_beside(series, entry, point, arm)}
                    )
    return rows


def as_row(entry: Entry, point: str, arm: str) -> dict[str, Any]:
    """What identifies a number."""
    return {"point": point or None, "name": entry.name, "unit": entry.unit, "definition": entry.definition, "arm": arm}


def ours_beside(series: Series, entry: Entry, point: str, arm: str) -> dict[str, Any]:
    """Our nearest word with its definition and its median over blocks."""
    if entry.ours is None:
        return {"ours": None, "ours_value": None, "ours_unit": None, "ours_definition": None}
    metric = latency.METRICS[entry.ours]
    costs = series.costs(f"{entry.ours}@{point}" if point else entry.ours, arm).values()
    return {
        "ours": entry.ours,
        "ours_value": metric.show(statistics.median(costs)) if costs else None,
        "ours_unit": metric.shown,
        "ours_definition": metric.about,
    }


def over_slots(series: Series, point: str, arm: str, value: Callable[[Requests], float | None]) -> float | None:
    """Median over blocks of a number computed in each slot from the requests that succeeded."""
    slots = [requests for (label, _, who), requests in series.slots.items() if (label, who) == (point, arm)]
    good = [[request for request in requests if request.error is None] for requests in slots]
    found = [number for requests in good if requests and (number := value(requests)) is not None]
    return statistics.median(found) if found else None
