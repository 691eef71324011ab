"""The requests between their submit and their terminal events: they take tokens, are told, and end."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pocketllm.engine.lifecycle.output_text import OutputText
from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.stats import Counters
from pocketllm.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]
"""Takes a request's events, on the loop's thread: it must return soon."""


@dataclass
class Active:
    """What the loop keeps of a request between submit and its terminal event."""

    request: Request
    sink: Sink
    text: OutputText
    sampler: Sampler
    is_deserted: bool = False
    """Whether its sink has failed: nobody listens any more."""


class Answers:
    """All active requests by id. Each gets exactly one FinishEvent, after which it is not here any more.

    door: guards what other threads look at, `active`.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, counters: Counters) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._counters = counters
        self.door = threading.Lock()
        self.active: dict[str, Active] = {}

    def sampler(self, request: Request) -> Sampler:
        """Of an active request."""
        return self.active[request.request_id].sampler

    # -- tokens ------------------------------------------------------------------------------------------------------
    def has_computed_prompt(self, request: Request) -> None:
        """A request's prompt has been computed; one that is only scored ends."""
        if not request.output_token_ids:
            self._counters.num_prompt_tokens += len(request.prompt_token_ids)
        if not request.max_output_tokens:
            self.finish(self.active[request.request_id], FinishReason.LENGTH)

    def accept(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A request's next token: its text is told, and it ends where it is to."""
        active = self.active[request.request_id]
        active.sampler.accept(token_id)
        self._scheduler.append(request, token_id)
        self._counters.num_generation_tokens += 1
        now_s = time.perf_counter()
        request.times.first_token_s = request.times.first_token_s or now_s
        request.times.last_token_s = now_s
        matcher = active.sampler.matcher
        is_complete = matcher is not None and matcher.is_complete
        is_stop = self._is_stop_token(request, token_id) or (is_complete and token_id in self._tokenizer.eos_token_ids)
        may_stop = len(request.output_token_ids) > request.params.min_tokens
        text, hit = active.text.push_last(token_id) if is_stop else active.text.push(token_id, may_stop)
        self._tell(active, TokenEvent(request.request_id, token_id, text, logprobs, now_s))
        if is_stop or hit or is_complete:
            self.finish(active, FinishReason.STOP, stop_string=hit)
        elif len(request.output_token_ids) >= request.max_output_tokens:
            self.finish(active, FinishReason.LENGTH)
        elif active.is_deserted:
            self.finish(active, FinishReason.CANCELLED)

    def _is_stop_token(self, request: Request, token_id: int) -> bool:
        params = request.params
        is_end = not params.ignore_eos and token_id in self._tokenizer.eos_token_ids
        return is_end or token_id in params.stop_token_ids

    # -- the end of a request ----------------------------------------------------------------------------------------
    def fail(self, requests: Iterable[Request], message: str, is_unanswerable: bool = False) -> None:
        """End those of some requests that are still active with an error."""
        for request in list(requests):
            active = self.active.get(request.request_id)
            if active is not None and active.request is request:
                self.finish(active, FinishReason.ERROR, error=message, is_unanswerable=is_unanswerable)

    def finish(
        self,
        active: Active,
        reason: FinishReason,
        *,
        error: str | None = None,
        is_unanswerable: bool = False,
        stop_string: str | None = None,
    ) -> None:
        """Free a request's blocks and send its one terminal event."""
        request = active.request
        text = ""
        if stop_string is None:
            text, stop_string = self._held_back(active)
            if stop_string and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP
        # what a failed step has left in the cache must not come back in another answer; a grammar's dead end leaves
        # nothing there
        self._scheduler.finish(request, is_sound=reason is not FinishReason.ERROR or is_unanswerable)
        request.times.finished_s = time.perf_counter()
        self._counters.finished[reason.value] += 1
        self._counters.num_cancelled += reason is FinishReason.CANCELLED
        event = FinishEvent(
            request_id=request.request_id,
            reason=reason,
            text=text,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            times=request.times,
            seed=request.seed,
            error=error,
            is_unanswerable=is_unanswerable,
            stop_string=stop_string,
            prompt_logits=request.prompt_logits if reason is FinishReason.LENGTH else None,
        )
        with self.door:
            del self.active[request.request_id]
        self._tell(active, event)

    def _held_back(self, active: Active) -> tuple[str, str | None]:
        try:
            return active.text.finish()
        except Exception:
            # the request ends all the same, with the text it has
            log.exception("the last text of request %s is lost", active.request.request_id)
            return "", None

    def _tell(self, active: Active, event: Event) -> None:
        try:
            active.sink(event)
        except Exception:
            # nobody listens any more: the request ends like one whose client has gone
            log.exception("the sink of request %s failed; it is cancelled", active.request.request_id)
            active.is_deserted = True
