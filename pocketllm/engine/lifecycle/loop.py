"""The one loop that moves all requests: take the inbox, schedule, run, sample, tell.

`step()` is synchronous and may be called directly; `start()` gives it a thread of its own. Requests enter and are
cancelled through an inbox, from any thread. Each accepted request gets exactly one FinishEvent, whatever happens.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pocketllm.engine.lifecycle.answers import Active, Answers, Sink
from pocketllm.engine.lifecycle.output_text import OutputText
from pocketllm.engine.lifecycle.request import FinishReason, Request
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.stats import Counters, LoopStats
from pocketllm.engine.lifecycle.steps.pipeline import StepRunner, Steps
from pocketllm.engine.structured.compiler import GrammarCompiler, Vocabulary
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.engine.structured.matcher import Matcher
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.errors import QueueFullError, RequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Submit:
    active: Active


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
        self._scheduler = scheduler
        self._num_compiles = num_compiles
        self._tokenizer = tokenizer
        # SimpleQueue.put may be called from a signal handler, so that ctrl-C can cancel
        self._inbox: SimpleQueue[_Submit | _Cancel | _Wake] = SimpleQueue()
        self._counters = Counters()
        self._answers = Answers(scheduler, tokenizer, self._counters)
        self._steps = Steps(scheduler, runner, self._answers, self._counters)
        self._active, self._door = self._answers.active, self._answers.door  # it guards _is_open as well
        self._is_open = True
        self._step_lock = threading.Lock()
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
            active = Active(request, sink, text, sampler)
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

    def _enter(self, active: Active) -> None:
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
        windows = scheduler.windows.pool if scheduler.windows is not None else None
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
            num_window_blocks=0 if windows is None else windows.num_blocks,
            num_free_window_blocks=0 if windows is None else windows.num_free,
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
        self._steps.masks.close()

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
                self._answers.fail([active.request for active in self._active.values()], "the engine's loop failed")
                self._tell_step_end()

    def step(self) -> bool:
        """Take the inbox and run one forward pass; True while work is left. No request's failure comes out here.

        Where a step stays in flight, its events come with the next call.
        """
        with self._step_lock:
            self._take_inbox()
            self._steps.advance(self._tell_step_end)
            if not self._active:
                self._steps.drop()
        if not self._steps.is_in_flight:  # otherwise as soon as the next step is launched
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
                    self._answers.finish(self._active[request_id], FinishReason.CANCELLED)
            case _Wake():
                pass
