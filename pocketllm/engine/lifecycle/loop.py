"""The one loop that moves all requests: take the inbox, schedule, run, sample, tell.

`step()` is synchronous and may be called directly; `start()` gives it a thread of its own. Requests enter and are
cancelled through an inbox, from any thread. Each accepted request gets exactly one FinishEvent, whatever happens.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from pocketllm.engine.lifecycle.output_text import OutputText
from pocketllm.engine.lifecycle.request import (
    Event,
    FinishEvent,
    FinishReason,
    Request,
    TokenEvent,
)
from pocketllm.engine.lifecycle.runner import LogitsRow
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Schedule, Scheduler
from pocketllm.engine.lifecycle.stats import Counters, LoopStats
from pocketllm.engine.structured.compiler import GrammarCompiler, Vocabulary
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.engine.structured.matcher import Matcher
from pocketllm.engine.structured.worker import MaskWorker
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.errors import ConstraintError, QueueFullError, RequestError

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]
"""Takes a request's events, on the loop's thread: it must return soon."""


class StepRunner(Protocol):
    """What the loop needs of a runner."""

    def run(self, schedule: Schedule) -> dict[Request, LogitsRow]:
        """Compute one step."""


@dataclass
class _Active:
    """What the loop keeps of a request between submit and its terminal event."""

    request: Request
    sink: Sink
    text: OutputText
    sampler: Sampler
    is_deserted: bool = False
    """Whether its sink has failed: nobody listens any more."""


@dataclass(frozen=True)
class _Submit:
    active: _Active


@dataclass(frozen=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True)
class _Wake:
    pass


class EngineLoop:
    """Requests in, events out."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: Tokenizer,
        num_compiles: Callable[[], int] = lambda: 0,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """num_compiles: what `LoopStats` says of the backend below the runner; vocabulary: see GrammarCompiler."""
        self._grammars = GrammarCompiler(tokenizer, vocabulary)
        self._masks = MaskWorker()
        self._scheduler = scheduler
        self._num_compiles = num_compiles
        self._runner = runner
        self._tokenizer = tokenizer
        # SimpleQueue.put may be called from a signal handler, so that ctrl-C can cancel
        self._inbox: SimpleQueue[_Submit | _Cancel | _Wake] = SimpleQueue()
        self._active: dict[str, _Active] = {}
        self._door = threading.Lock()  # guards _active and _is_open
        self._is_open = True
        self._step_lock = threading.Lock()
        self._counters = Counters()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._step_end: list[Callable[[], None]] = []

    # -- any thread ------------------------------------------------------------------------------------------------
    def check(self, request: Request) -> None:
        """Raise what `submit` would, for a request that can never be served."""
        self._scheduler.check(request)
        self._matcher(request)

    def compile(self, constraint: Constraint) -> None:
        """Compile what requests are to be held to, so that submitting one takes no time. Raises RequestError."""
        self._grammars.matcher(constraint)

    def on_compile(self, listener: Callable[[float], None]) -> None:
        """Have `listener` told, on whatever thread, the seconds of each compilation of a constraint."""
        self._grammars.listeners.append(listener)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its events go to `sink`.

        Raises at once, and then no event follows: RequestError or ContextLengthError when it can never be served,
        QueueFullError when too many wait or the loop has been stopped.
        """
        try:
            self._scheduler.check(request)
            params = request.params
            text = OutputText(self._tokenizer, params.stop, params.include_stop_str_in_output, params.markup)
            matcher = self._matcher(request)
            sampler = Sampler(params, request.seed, request.prompt_token_ids, self._tokenizer, matcher)
            active = _Active(request, sink, text, sampler)
            self._enter(active)
        except (RequestError, QueueFullError):
            with self._door:
                self._counters.num_rejected += 1
            raise
        self._inbox.put(_Submit(active))

    def _matcher(self, request: Request) -> Matcher | None:
        params = request.params
        if params.constraint is None:
            return None
        return self._grammars.matcher(params.constraint, params.stop_token_ids, params.ignore_eos)

    def _enter(self, active: _Active) -> None:
        limits = self._scheduler.limits
        with self._door:
            if not self._is_open:
                raise QueueFullError("the engine is stopping and takes no more requests")
            if active.request.request_id in self._active:
                raise RequestError(f"request id {active.request.request_id!r} is in use", param="request_id")
            num_queued = len(self._active) - limits.max_num_seqs
            if num_queued >= limits.max_queued_requests:
                raise QueueFullError(
                    f"{num_queued} requests are waiting (max_queued_requests={limits.max_queued_requests}): "
                    "come back later"
                )
            self._active[active.request.request_id] = active
            self._counters.num_submitted += 1

    def on_step_end(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on the loop's thread, whenever it has told events and goes on to compute or rest.

        A sink that hands events to another thread wakes it here: once a step, however many requests there are.
        """
        self._step_end.append(listener)

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step; False when there is none of that id (it may have finished)."""
        self._inbox.put(_Cancel(request_id))
        return request_id in self._active

    def cancel_all(self) -> None:
        """End every request before the next step."""
        for request_id in list(self._active):
            self._inbox.put(_Cancel(request_id))

    def stats(self) -> LoopStats:
        """A snapshot; a number may be one step older than its neighbor."""
        scheduler, pool, cache = self._scheduler, self._scheduler.pool, self._scheduler.prefix_cache
        num_running = len(scheduler.running)
        counters = {name: value for name, value in vars(self._counters).items() if name != "finished"}
        return LoopStats(
            num_running=num_running,
            num_waiting=max(len(self._active) - num_running, 0),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_compiles=self._num_compiles(),
            num_prefix_queried_tokens=None if cache is None else cache.num_queried_tokens,
            num_prefix_hit_tokens=None if cache is None else cache.num_hit_tokens,
            finished={reason.value: self._counters.finished[reason.value] for reason in FinishReason},
            **counters,
        )

    def reset_prefix_cache(self) -> bool:
        """Let no later request find what was computed until now; waits for a step in progress.

        True when it happened, False when the loop has no prefix cache.
        """
        with self._step_lock:
            cache = self._scheduler.prefix_cache
            if cache is not None:
                cache.reset()
            return cache is not None

    @property
    def is_running(self) -> bool:
        """Whether the loop has a thread of its own."""
        return self._thread is not None

    def start(self) -> None:
        """Give the loop a thread; does nothing when it has one."""
        with self._door:
            if self._thread is not None:
                return
            self._is_open = True
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run_thread, name="pocketllm-loop", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no more requests, let those in flight finish for up to `timeout_s`, cancel the rest, end the thread."""
        with self._door:
            self._is_open = False
        deadline_s = time.monotonic() + timeout_s
        while self._active and time.monotonic() < deadline_s:
            if self._thread is None:
                self.step()
            else:
                time.sleep(0.005)
        self.cancel_all()
        thread, self._thread = self._thread, None
        if thread is None:
            self.step()
        else:
            self._stopping.set()
            self._inbox.put(_Wake())
            thread.join()
        self._masks.close()

    # -- the loop's thread -------------------------------------------------------------------------------------------
    def _run_thread(self) -> None:
        while self._active or not self._stopping.is_set():
            try:
                if not self.step() and not self._stopping.is_set():
                    message = self._inbox.get()
                    with self._step_lock:
                        self._inbox_message(message)
            except Exception:  # only our own bug comes here; the requests end, the loop goes on
                log.exception("a step of the loop failed; all requests end")
                self._fail([active.request for active in self._active.values()], "the engine's loop failed")
                self._tell_step_end()

    def step(self) -> bool:
        """Take the inbox and run one forward pass; True while work is left. No request's failure comes out here."""
        with self._step_lock:
            self._take_inbox()
            if self._scheduler.has_work:
                self._run(self._scheduler.schedule())
        self._tell_step_end()
        return bool(self._active)

    def _tell_step_end(self) -> None:
        for listener in self._step_end:
            listener()

    def _take_inbox(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            self._inbox_message(message)

    def _inbox_message(self, message: _Submit | _Cancel | _Wake) -> None:
        match message:
            case _Submit(active):
                # otherwise it was cancelled before it was read
                if self._active.get(active.request.request_id) is active:
                    self._scheduler.add(active.request)
            case _Cancel(request_id):
                if request_id in self._active:  # otherwise it has ended
                    self._finish(self._active[request_id], FinishReason.CANCELLED)
            case _Wake():
                pass

    def _run(self, schedule: Schedule) -> None:
        now_s = time.perf_counter()
        for request in schedule.num_tokens:
            if request.times.scheduled_s is None:
                request.times.scheduled_s = now_s
        samplers = [self._active[request.request_id].sampler for request in schedule.num_tokens]
        self._masks.prefetch(sampler.matcher for sampler in samplers if sampler.matcher is not None)
        try:
            logits = self._runner.run(schedule)
        except Exception as error:
            log.exception("the forward pass failed; its %d requests end", len(schedule.num_tokens))
            self._counters.num_failed_steps += 1
            self._fail(schedule.num_tokens, f"the forward pass failed ({type(error).__name__})")
            return
        if schedule.total_tokens:
            self._count(schedule)
        for request in self._scheduler.update(schedule):
            try:
                if request in logits:
                    self._scheduler.keep_end(request, logits[request])
                self._advance(self._active[request.request_id], logits.get(request))
            except Exception as error:
                is_known = isinstance(error, FloatingPointError | ConstraintError)
                trace = None if isinstance(error, ConstraintError) else error
                log.error("choosing a token failed (%s); request %s ends", error, request.request_id, exc_info=trace)
                message = str(error) if is_known else f"choosing a token failed ({type(error).__name__})"
                self._fail([request], message, is_unanswerable=isinstance(error, ConstraintError))

    def _count(self, schedule: Schedule) -> None:
        counters, total = self._counters, schedule.total_tokens
        counters.num_steps += 1
        counters.num_step_tokens += total
        counters.max_step_tokens = max(counters.max_step_tokens, total)
        counters.max_step_seqs = max(counters.max_step_seqs, len(schedule.num_tokens))

    def _advance(self, active: _Active, logits: LogitsRow | None) -> None:
        """A request has caught up: give it its next token, or end it when it is only scored."""
        request = active.request
        if not request.output_token_ids:
            self._counters.num_prompt_tokens += len(request.prompt_token_ids)
        if not request.max_output_tokens:
            self._finish(active, FinishReason.LENGTH)
            return
        assert logits is not None, request.request_id
        self._accept(active, *active.sampler.sample(logits))

    def _accept(self, active: _Active, token_id: int, logprobs: TokenLogprobs | None) -> None:
        request = active.request
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
            self._finish(active, FinishReason.STOP, stop_string=hit)
        elif len(request.output_token_ids) >= request.max_output_tokens:
            self._finish(active, FinishReason.LENGTH)
        elif active.is_deserted:
            self._finish(active, FinishReason.CANCELLED)

    def _is_stop_token(self, request: Request, token_id: int) -> bool:
        params = request.params
        is_end = not params.ignore_eos and token_id in self._tokenizer.eos_token_ids
        return is_end or token_id in params.stop_token_ids

    # -- the end of a request ----------------------------------------------------------------------------------------
    def _fail(self, requests: Iterable[Request], message: str, is_unanswerable: bool = False) -> None:
        for request in list(requests):
            active = self._active.get(request.request_id)
            if active is not None and active.request is request:
                self._finish(active, FinishReason.ERROR, error=message, is_unanswerable=is_unanswerable)

    def _finish(
        self,
        active: _Active,
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
        with self._door:
            del self._active[request.request_id]
        self._tell(active, event)

    def _held_back(self, active: _Active) -> tuple[str, str | None]:
        try:
            return active.text.finish()
        except Exception:
            # the request ends all the same, with the text it has
            log.exception("the last text of request %s is lost", active.request.request_id)
            return "", None

    def _tell(self, active: _Active, event: Event) -> None:
        try:
            active.sink(event)
        except Exception:
            # nobody listens any more: the request ends like one whose client has gone
            log.exception("the sink of request %s failed; it is cancelled", active.request.request_id)
            active.is_deserted = True
