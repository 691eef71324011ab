"""What became of a request, gathered from its events."""

from dataclasses import asdict, dataclass, field

from pocketllm.engine.lifecycle.request import Event, FinishEvent, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        """JSON-able, with the total."""
        return {**asdict(self), "total_tokens": self.total_tokens}


@dataclass(frozen=True)
class Timings:
    """Seconds; None for a phase that was not reached. The first token belongs to prefill."""

    load_s: float
    """Loading the engine, once for all requests."""
    queue_s: float | None
    """From submit to the first step that computes the request."""
    prefill_s: float | None
    """From there to the first token."""
    ttft_s: float | None
    """From submit to the first token."""
    decode_s: float | None
    """From the first token to the last."""
    total_s: float
    """From submit to the end."""

    def as_dict(self) -> dict[str, float | None]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class GenerationResult:
    """What became of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """All generated tokens, the one that ended the answer included."""
    text: str
    finish_reason: str
    """stop, length, cancelled or error."""
    usage: Usage
    timings: Timings
    seed: int
    """The seed that was used, also when none was given."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token that was reached, the first None; when the parameters asked for them."""
    stop_string: str | None = None
    error: str | None = None


@dataclass
class Collector:
    """Gathers one request's events into its result."""

    request: Request
    load_s: float
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishEvent | None = None

    def take(self, event: Event) -> None:
        match event:
            case TokenEvent():
                self.token_ids.append(event.token_id)
                self.texts.append(event.text)
                if event.logprobs is not None:
                    self.logprobs.append(event.logprobs)
            case FinishEvent():
                self.texts.append(event.text)
                self.finish = event

    def result(self) -> GenerationResult:
        event = self.finish
        assert event is not None, self.request.request_id
        return GenerationResult(
            request_id=event.request_id,
            prompt_token_ids=list(self.request.prompt_token_ids),
            token_ids=self.token_ids,
            text="".join(self.texts),
            finish_reason=event.reason.value,
            usage=Usage(event.num_prompt_tokens, event.num_output_tokens, event.num_cached_tokens),
            timings=timings(event, self.load_s),
            seed=event.seed,
            logprobs=None if self.request.params.logprobs is None else self.logprobs,
            prompt_logprobs=None if self.request.params.prompt_logprobs is None else list(self.request.prompt_logprobs),
            stop_string=event.stop_string,
            error=event.error,
        )


def timings(event: FinishEvent, load_s: float) -> Timings:
    """Phases of a finished request."""
    times = event.times

    def between(start_s: float | None, end_s: float | None) -> float | None:
        return None if start_s is None or end_s is None else end_s - start_s

    total_s = between(times.submitted_s, times.finished_s)
    assert total_s is not None
    return Timings(
        load_s=load_s,
        queue_s=between(times.submitted_s, times.scheduled_s),
        prefill_s=between(times.scheduled_s, times.first_token_s),
        ttft_s=between(times.submitted_s, times.first_token_s),
        decode_s=between(times.first_token_s, times.last_token_s),
        total_s=total_s,
    )
