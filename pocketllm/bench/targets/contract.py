"""What the run knows of a target: ask it once, know that it is idle, close it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of exact length in tokens, and how many to generate, greedily, past any end token."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    max_tokens: int


@dataclass
class Sample:
    """What one request showed; `time.perf_counter_ns()` stamps, None where the target does not say.

    `t_start_ns` is where prefill begins: first scheduled in process, sent over HTTP. A chunk is what came at once;
    `chunk_ntok` counts its tokens and is empty where they cannot be told apart.
    """

    t_sched_ns: int
    t_send_ns: int
    t_start_ns: int
    t_first_ns: int | None = None
    chunk_t_ns: list[int] = field(default_factory=list)
    chunk_ntok: list[int] = field(default_factory=list)
    n_prompt: int | None = None
    n_cached: int | None = None
    n_out: int = 0
    out_ids: tuple[int, ...] | None = None
    out_text: str = ""
    finish: str | None = None
    http_status: int | None = None
    error: str | None = None
    srv_prefill_s: float | None = None
    srv_decode_s: float | None = None
    srv_queue_s: float | None = None

    @property
    def t_first_content_ns(self) -> int | None:
        return self.chunk_t_ns[0] if self.chunk_t_ns else None

    @property
    def t_last_ns(self) -> int | None:
        return self.chunk_t_ns[-1] if self.chunk_t_ns else None

    def costs(self) -> dict[str, float]:
        """Seconds per token by metric: `prefill` (start → first token), `first_decode` (the gap after it), `decode`
        (every later gap); a metric that this request cannot show is absent.
        """
        if self.error is not None or not self.chunk_t_ns or not self.n_prompt:
            return {}
        times, counts = self.chunk_t_ns, self.chunk_ntok or [1] * len(self.chunk_t_ns)
        found = {"prefill": (times[0] - self.t_start_ns) / 1e9 / self.n_prompt}
        if len(times) > 1:
            found["first_decode"] = (times[1] - times[0]) / 1e9 / max(counts[1], 1)
        if self.chunk_ntok and sum(counts[2:]):
            found["decode"] = (times[-1] - times[1]) / 1e9 / sum(counts[2:])
        elif not self.chunk_ntok and len(times) > 1 and self.n_out > 1:
            # tokens of a chunk unknown: all after the first chunk, taken to hold one token, over the whole rest
            found["decode"] = (times[-1] - times[0]) / 1e9 / (self.n_out - 1)
        return {metric: cost for metric, cost in found.items() if cost > 0}


class Target(Protocol):
    """A thing that can be asked. One caller, one request at a time (concurrency 1)."""

    @property
    def kind(self) -> str:
        """`engine` or `openai_http`."""

    def ask(self, ask: Ask) -> Sample:
        """Run one request to its end; a request that fails comes back with `error` set, it does not raise."""

    def probe(self, ask: Ask) -> Sample:
        """The first request: may learn how the target wants to be asked. NotJudgedError when it cannot be asked."""

    def in_flight(self) -> int:
        """Requests not yet ended, as the target counts them; 0 at every seam."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for the record: `served_by`, `plan`, `model` …, absent where unknown."""

    def fingerprint(self) -> str:
        """Digest of what must not change while a run lasts."""

    def close(self) -> None:
        """Let go of the target; a server that we did not start keeps running."""


def slot_costs(samples: Sequence[Sample]) -> dict[str, float]:
    """A slot's value for each metric: the median over its requests of seconds per token."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for metric, cost in sample.costs().items():
            found.setdefault(metric, []).append(cost)
    return {metric: statistics.median(costs) for metric, costs in found.items()}
