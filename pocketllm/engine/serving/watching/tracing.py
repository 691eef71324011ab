"""OpenTelemetry: a span for each generation call, sent over OTLP/HTTP; the `otel` extra, imported only when asked for.

Names are those of the semantic conventions for generative AI; the span continues the client's trace, where the request
has a `traceparent` header. No texts are sent.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pocketllm.engine.serving.transport.request_log import Summary
from pocketllm.errors import OptionError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NANO = 10**9


class Tracer:
    """Sends spans from a thread of its own; a collector that cannot be reached costs requests nothing."""

    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pocketllm")
        self._model_name = model_name

    def record(self, summary: Summary, headers: Mapping[str, str]) -> None:
        """A call that has ended, as one span over its whole time."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {
            "gen_ai.operation.name": "text_completion" if summary.path == "/v1/completions" else "chat",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": summary.id,
            "gen_ai.response.finish_reasons": summary.finish_reasons,
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.output_tokens": summary.completion_tokens,
            "gen_ai.latency.time_in_queue": summary.queue_s,
            "gen_ai.latency.time_to_first_token": summary.ttft_s,
            "pocketllm.request_id": summary.request_id,
        }
        span = self._tracer.start_span(
            f"POST {summary.path}",
            context=TraceContextTextMapPropagator().extract({"traceparent": headers.get("traceparent", "")}),
            kind=SpanKind.SERVER,
            start_time=int(summary.began_at * NANO),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        span.end(int((summary.began_at + summary.total_s) * NANO))

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def check_tracing(endpoint: str | None) -> None:
    """Raise OptionError where traces are asked for and cannot be sent."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError(f"--otlp-traces-endpoint {endpoint} is not an http address")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise OptionError("--otlp-traces-endpoint needs the extra: pip install 'pocketllm[otel]'") from error


def make_tracer(endpoint: str | None, model_name: str) -> Tracer | None:
    """What sends spans to a collector's full address (…/v1/traces); None where none is asked for."""
    if endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "pocketllm"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=2), schedule_delay_millis=500))
    return Tracer(provider, model_name)
