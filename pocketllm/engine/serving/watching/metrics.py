"""What Prometheus scrapes: vLLM's stems under `pocketllm:`, in a registry of the server's own.

Every series exists from the start with its real value, zero included; what this engine does not have (speculation, or a
prefix cache that was switched off) has no series at all, so an absent series is never to be read as zero.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request, TokenEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pocketllm:"
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class LoopCollector:
    """Reads the engine's own counts at the moment of a scrape, so that they are never stale."""

    def __init__(self, model_name: str, read_stats: Callable[[], Any]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        """The gauges, and what the scheduler counted."""
        stats = self._read_stats()
        gauges = {
            "num_requests_running": ("Requests being computed.", stats.num_running),
            "num_requests_waiting": ("Requests waiting for room.", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of cache blocks in use; 1 is all.", stats.kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        counters = {
            "num_preemptions": ("Requests sent back to waiting because blocks ran out.", stats.num_preemptions),
            "num_compiles": ("Kernel compilations and graph captures.", stats.num_compiles),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.num_prefix_queried_tokens),
            "prefix_cache_hits": ("Tokens found there, and not computed.", stats.num_prefix_hit_tokens),
        }
        for name, (text, value) in counters.items():
            if value is not None:
                counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
                counter.add_metric([self._model_name], value)
                yield counter


class ServerMetrics:
    """Counters and histograms of one served model; `observe` is called as events are delivered."""

    def __init__(self, model_name: str, read_stats: Callable[[], Any]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(LoopCollector(model_name, read_stats))
        self._model_name = model_name
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, cached ones too, of requests that got a token."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cancellations = self._counter("cancellations", "Requests ended by a disconnect or a shutdown.")
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Submission to the first token.")
        self.itl_s = self._histogram("inter_token_latency_seconds", "Between two tokens.", TOKEN_BUCKETS)
        self.tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after its first.", TOKEN_BUCKETS
        )
        self.e2el_s = self._histogram("e2e_request_latency_seconds", "Submission to the terminal event.")
        self.queue_s = self._histogram("request_queue_time_seconds", "Submission to the first step.")
        self.prefill_s = self._histogram("request_prefill_time_seconds", "First step to the first token.")
        self.decode_s = self._histogram("request_decode_time_seconds", "First token to the last.")
        self.grammar_s = self._histogram(
            "grammar_compilation_seconds", "Compiling what answers must obey, where it was not known.", TOKEN_BUCKETS
        )
        self._success = Counter(
            PREFIX + "request_success",
            "Requests by how they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            PREFIX + "admission_rejections",
            "Requests refused before they were queued.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)
        for refusal in ("queue_full", "draining", "invalid"):
            self._rejections.labels(model_name, refusal)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)

    def reject(self, reason: str) -> None:
        """Count one refusal before the queue."""
        self._rejections.labels(self._model_name, reason).inc()

    def observer(self, request: Request) -> Callable[[Event], None]:
        """What counts one request's events."""
        last_s: float | None = None

        def observe(event: Event) -> None:
            nonlocal last_s
            if isinstance(event, TokenEvent):
                if last_s is None:
                    self.prompt_tokens.inc(len(request.prompt_token_ids))
                    self.ttft_s.observe(event.time_s - request.times.submitted_s)
                else:
                    self.itl_s.observe(event.time_s - last_s)
                last_s = event.time_s
                self.generation_tokens.inc()
            else:
                self._finish(event)

        return observe

    def _finish(self, event: FinishEvent) -> None:
        times = event.times
        self._success.labels(self._model_name, event.reason.value).inc()
        if event.reason is FinishReason.CANCELLED:
            self.cancellations.inc()
        assert times.finished_s is not None
        self.e2el_s.observe(times.finished_s - times.submitted_s)
        if times.scheduled_s is None:
            return
        self.queue_s.observe(times.scheduled_s - times.submitted_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        self.prefill_s.observe(times.first_token_s - times.scheduled_s)
        decode_s = times.last_token_s - times.first_token_s
        self.decode_s.observe(decode_s)
        if event.num_output_tokens > 1:
            self.tpot_s.observe(decode_s / (event.num_output_tokens - 1))

    def exposition(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)
