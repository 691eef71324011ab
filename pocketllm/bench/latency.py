"""The latency words: what is made of a request's stamps and of the tokens of its chunks; pure.

Words of one request follow vLLM's client (`vllm bench serve`), so that tools can be compared; `reports.views`
recomputes what others call by the same names. Every cost is in seconds per unit, so that more is slower everywhere.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

CONFIDENCE = 0.95


class Timed(Protocol):
    """What the words need of a request; a sample has it, and `Timing` has it of a record's row."""

    @property
    def t_sched_ns(self) -> int: ...

    @property
    def t_send_ns(self) -> int: ...

    @property
    def t_start_ns(self) -> int: ...

    @property
    def t_first_ns(self) -> int | None: ...

    @property
    def chunk_t_ns(self) -> Sequence[int]: ...

    @property
    def chunk_ntok(self) -> Sequence[int]: ...

    @property
    def n_prompt(self) -> int | None: ...

    @property
    def n_out(self) -> int: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True)
class Timing:
    """One request of a record."""

    t_sched_ns: int
    t_send_ns: int
    t_start_ns: int
    t_first_ns: int | None
    chunk_t_ns: list[int]
    chunk_ntok: list[int]
    n_prompt: int | None
    n_out: int
    error: str | None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Timing":
        """From a bench row; a row without chunk lists (they may be left out) has no chunks but its first and last."""
        ends = [stamp for stamp in (row["t_first_content_ns"], row["t_last_ns"]) if stamp is not None]
        chunks = row["chunk_t_ns"]
        send = row["t_send_ns"] or 0
        return cls(
            t_sched_ns=row["t_sched_ns"] if row["t_sched_ns"] is not None else send,
            t_send_ns=send,
            t_start_ns=send + round((row["srv_queue_s"] or 0.0) * 1e9),
            t_first_ns=row["t_first_ns"],
            chunk_t_ns=list(ends if chunks is None else chunks),
            chunk_ntok=list(row["chunk_ntok"] or []),
            n_prompt=row["n_prompt"],
            n_out=row["n_out"] or 0,
            error=row["error"],
        )


# -- one request -------------------------------------------------------------------------------------------------------
def late_s(request: Timed) -> float:
    """Scheduled → sent: how long the client itself held a request back."""
    return seconds(request.t_sched_ns, request.t_send_ns)


def ttft_s(request: Timed) -> float | None:
    """Send → first chunk with content, queueing included; None where nothing came."""
    return seconds(request.t_send_ns, request.chunk_t_ns[0]) if request.chunk_t_ns else None


def ttft_any_s(request: Timed) -> float | None:
    """Send → first chunk of any kind, content or not."""
    return None if request.t_first_ns is None else seconds(request.t_send_ns, request.t_first_ns)


def e2el_s(request: Timed) -> float | None:
    """Send → last chunk."""
    return seconds(request.t_send_ns, request.chunk_t_ns[-1]) if request.chunk_t_ns else None


def tpot_s(request: Timed) -> float | None:
    """(E2EL − TTFT) / (n_out − 1); None for one token or none, which have no such time."""
    if not request.chunk_t_ns or request.n_out <= 1:
        return None
    return seconds(request.chunk_t_ns[0], request.chunk_t_ns[-1]) / (request.n_out - 1)


def gaps_s(request: Timed) -> list[float]:
    """Times between chunks: inter-token latencies when every chunk holds one token, else chunk gaps.

    None where only the first and the last stamp were kept.
    """
    if has_ends_only(request):
        return []
    return [seconds(before, after) for before, after in pairwise(request.chunk_t_ns)]


def has_ends_only(request: Timed) -> bool:
    """Whether a request shows its first and last stamp, and none of those between: what a record may leave out."""
    return len(request.chunk_t_ns) == 2 and not request.chunk_ntok and request.n_out != 2


def is_token_by_token(requests: Sequence[Timed]) -> bool:
    """Whether a chunk gap is an inter-token latency."""
    return all(set(request.chunk_ntok) <= {1} for request in requests if request.chunk_ntok)


def prefill_s(request: Timed) -> float | None:
    """Seconds per prompt token, start → first token."""
    if not request.chunk_t_ns or not request.n_prompt:
        return None
    return seconds(request.t_start_ns, request.chunk_t_ns[0]) / request.n_prompt


def first_decode_s(request: Timed) -> float | None:
    """The gap after the first token, per token of its chunk; None where it was not kept."""
    if len(request.chunk_t_ns) < 2 or has_ends_only(request):
        return None
    count = request.chunk_ntok[1] if request.chunk_ntok else 1
    return seconds(request.chunk_t_ns[0], request.chunk_t_ns[1]) / max(count, 1)


def decode_s(request: Timed) -> float | None:
    """Seconds per token over every gap after the second chunk."""
    stamps, counts = request.chunk_t_ns, request.chunk_ntok
    if counts:
        return seconds(stamps[1], stamps[-1]) / sum(counts[2:]) if sum(counts[2:]) else None
    # tokens of a chunk unknown: all after the first chunk, taken to hold one token, over the whole rest
    return tpot_s(request) if len(stamps) > 1 else None


def seconds(begin_ns: int, end_ns: int) -> float:
    """From one stamp to another."""
    return (end_ns - begin_ns) / 1e9


# -- the requests of one slot ------------------------------------------------------------------------------------------
def window_s(requests: Sequence[Timed]) -> float | None:
    """First send → last chunk of all; None where nothing came."""
    ends = [request.chunk_t_ns[-1] for request in requests if request.chunk_t_ns]
    return seconds(min(request.t_send_ns for request in requests), max(ends)) if ends else None


def achieved_concurrency(requests: Sequence[Timed]) -> float | None:
    """Mean number of requests in flight over the window: the sum of all E2EL over its length."""
    window = window_s(requests)
    return sum(e2el_s(request) or 0.0 for request in requests) / window if window else None


def is_good(request: Timed, slos: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every limit (ttft, tpot, e2el); a request without a TPOT meets that one."""
    values = {"ttft": ttft_s(request), "tpot": tpot_s(request) or 0.0, "e2el": e2el_s(request)}
    found = [values[name] for name in slos]
    return request.error is None and all(
        value is not None and value <= limit for value, limit in zip(found, slos.values(), strict=True)
    )


@dataclass(frozen=True)
class Metric:
    """How a metric is read: its unit as a cost, and how people want it shown."""

    about: str
    unit: str
    shown: str
    """Unit of `show`."""
    show: Callable[[float], float]
    verb: tuple[str, str]
    """`decodes` and `decode`, for sentences."""


def inverse(cost: float) -> float:
    """A rate from a cost."""
    return 1 / cost


def milli(cost: float) -> float:
    """Seconds as milliseconds."""
    return cost * 1e3


METRICS: Mapping[str, Metric] = {
    "prefill": Metric("reading the prompt", "s/token", "tok/s", inverse, ("prefills", "prefill")),
    "decode": Metric("generating, from the third token on", "s/token", "tok/s", inverse, ("decodes", "decode")),
    "first_decode": Metric("the second token", "s", "ms", milli, ("makes its second token", "the second token")),
    "ttft": Metric("send → first content", "s", "ms", milli, ("gives its first token", "TTFT")),
    "ttft_any": Metric("send → first chunk of any kind", "s", "ms", milli, ("gives its first token", "TTFT")),
    "e2el": Metric("send → last chunk", "s", "ms", milli, ("completes requests", "E2EL")),
    "tpot": Metric("(E2EL − TTFT) / (n_out − 1)", "s/token", "ms", milli, ("generates", "TPOT")),
    "itl": Metric("median gap between chunks", "s", "ms", milli, ("streams", "ITL")),
    "throughput": Metric(
        "output tokens over the window", "s/token", "tok/s", inverse, ("puts out tokens", "throughput")
    ),
    "request_throughput": Metric(
        "requests over the window", "s/request", "req/s", inverse, ("completes requests", "throughput")
    ),
    "goodput": Metric("requests within every SLO", "s/request", "req/s", inverse, ("serves in time", "goodput")),
    "op": Metric("one call of a kernel", "s", "µs", lambda cost: cost * 1e6, ("computes", "the operation")),
    "step": Metric("one step beside the model", "s", "µs", lambda cost: cost * 1e6, ("schedules", "a step")),
    "start": Metric("process start → first token", "s", "s", lambda cost: cost, ("starts", "start")),
}


def metric_of(name: str) -> Metric:
    """The metric of a full name such as `decode@16k`; an unknown one is read in plain seconds."""
    base = name.partition("@")[0]
    return METRICS.get(base) or Metric(base, "s", "ms", milli, (f"does {base}", base))


WORDS: Mapping[str, Callable[[Timed], float | None]] = {
    "prefill": prefill_s,
    "first_decode": first_decode_s,
    "decode": decode_s,
    "ttft": ttft_s,
    "ttft_any": ttft_any_s,
    "e2el": e2el_s,
    "tpot": tpot_s,
}
"""Costs of one request; a slot's value is their median."""


def slot_values(requests: Sequence[Timed], slos: Mapping[str, float] | None = None) -> dict[str, float]:
    """Costs of the requests of one slot at one point, by metric; what they cannot show is absent."""
    good = [request for request in requests if request.error is None]
    found: dict[str, float | None] = {}
    for name, word in WORDS.items():
        costs = [cost for request in good if (cost := word(request)) is not None and cost > 0]
        found[name] = statistics.median(costs) if costs else None
    gaps = [gap for request in good for gap in gaps_s(request)]
    found["itl"] = statistics.median(gaps) if gaps else None
    window, tokens = window_s(good) if good else None, sum(request.n_out for request in good)
    if window:
        within = sum(is_good(request, slos) for request in good) if slos else 0
        found["throughput"] = window / tokens if tokens else None
        found["request_throughput"] = window / len(good)
        found["goodput"] = window / within if within else None
    return {name: value for name, value in found.items() if value is not None and value > 0}


# -- quantiles ---------------------------------------------------------------------------------------------------------
def fewest_for(quantile: float) -> int:
    """Requests from which a quantile is told: enough that one lies beyond it with 95 % confidence.

    >>> [fewest_for(q) for q in (0.9, 0.95, 0.99, 0.999)]
    [29, 59, 299, 2995]
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(quantile))


@dataclass(frozen=True)
class Quantile:
    """A quantile of `n` values, or None with the reason that there are too few; `maximum` is always there."""

    quantile: float
    n: int
    value: float | None
    maximum: float

    @property
    def refusal(self) -> str:
        """`n/a (80 < 299)`."""
        return f"n/a ({self.n} < {fewest_for(self.quantile)})"


def quantile_of(values: Sequence[float], quantile: float) -> Quantile | None:
    """Linear between order statistics, as numpy and vLLM have it; None of no values."""
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    place = quantile * (n - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    value = below + (above - below) * (place - math.floor(place))
    enough = quantile <= 0.5 or n >= fewest_for(quantile)
    return Quantile(quantile, n, value if enough else None, ordered[-1])
