"""What the run knows of a target: put a load on it, know that it is idle, close it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

MAX_STREAMS = 64
"""Most requests that one client process keeps in flight; its own lag is measured."""


class Need(Enum):
    """What only some targets can do; each declares its own set."""

    STRUCTURED = "structured output (a JSON schema)"
    ENGINE = "an engine in this process"


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of exact length in tokens, and how many to generate, greedily, past any end token."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    prompt_text: str
    max_tokens: int
    offset_s: float | None = None
    """When it is to be sent, from the start of its load; None: as soon as a place is free."""
    json_schema: Mapping[str, Any] | None = None
    """What the answer must obey; None: nothing."""


@dataclass
class Sample:
    """What one request showed; `time.perf_counter_ns()` stamps, None where the target does not say.

    `t_sched_ns` is when it was to leave, `t_send_ns` when it did; `t_start_ns` is where prefill begins: first scheduled
    in process, sent over HTTP. A chunk is what came at once; `chunk_ntok` counts its tokens and is empty where they
    cannot be told apart.
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
    srv_running: float | None = None
    """Requests that the server computed at a time while its load offered all: the median of its own gauge."""
    compiles: int | None = None
    """Kernel compilations and graph captures of the server around this request; None where it does not count them."""
    loop_lag_ms: float | None = None
    """How late the client's own threads woke while this request ran (p99); None: no client in between."""

    @property
    def t_first_content_ns(self) -> int | None:
        return self.chunk_t_ns[0] if self.chunk_t_ns else None

    @property
    def t_last_ns(self) -> int | None:
        return self.chunk_t_ns[-1] if self.chunk_t_ns else None


class Target(Protocol):
    """A thing that can be asked, by one caller."""

    @property
    def kind(self) -> str:
        """`engine` or `openai_http`."""

    @property
    def has(self) -> frozenset[Need]:
        """What it can do that not every target can."""

    @property
    def pid(self) -> int | None:
        """The process that it runs in, where that is known and ours to read."""

    def ask(self, ask: Ask) -> Sample:
        """Run one request to its end; a request that fails comes back with `error` set, it does not raise."""

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Sample]:
        """Run all of them, samples in their order.

        One with an offset leaves so long after the call, whatever is in flight; the others leave in order, each as soon
        as one of `concurrency` places is free.
        """

    def probe(self, ask: Ask) -> Sample:
        """The first request: may learn how the target wants to be asked. NotJudgedError when it cannot be asked."""

    def in_flight(self) -> int:
        """Requests not yet ended, as the client counts them and, where it tells, the server; 0 at every seam."""

    def reset_cache(self) -> bool | None:
        """Forget computed prompts; whether that was proved to have happened. None: it has no such cache to reset."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for the record: `served_by`, `plan`, `model` …, absent where unknown."""

    def fingerprint(self) -> str:
        """Digest of what must not change while a run lasts."""

    def close(self) -> None:
        """Let go of the target; a server that we did not start keeps running."""
