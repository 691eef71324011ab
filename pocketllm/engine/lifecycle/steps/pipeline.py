"""Launches steps, has their tokens drawn and collects them, as many at once as the backend takes.

One at a time: schedule, forward, draw, collect. With one in flight, step N + 1 is launched before the tokens of step N
have come: a token that is on its way is an input by the row that it is drawn for. What the host makes of the tokens of
step N (text, stops, masks, penalties) it makes while step N + 1 computes, and only then says how the tokens of step
N + 1 are drawn. So a token is drawn knowing all before it, whatever is in flight; and a request that has ended has one
row too many in the next step, for which nothing is drawn.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pocketllm.engine.lifecycle.answers import Answers
from pocketllm.engine.lifecycle.request import Request, RequestState
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Schedule, Scheduler
from pocketllm.engine.lifecycle.stats import Counters
from pocketllm.engine.lifecycle.steps.runner import Draws, Launched
from pocketllm.engine.structured.worker import MaskWorker
from pocketllm.errors import ConstraintError

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the steps need of a runner."""

    def launch(self, schedule: Schedule, pending_ids: Mapping[Request, int]) -> Launched:
        """Start to compute one step."""

    def draw(self, launched: Launched, samplers: Mapping[Request, Sampler]) -> Draws:
        """Start to draw tokens from it."""


@dataclass(frozen=True)
class _Step:
    """A step whose tokens are on their way."""

    launched: Launched
    draws: Draws

    @property
    def schedule(self) -> Schedule:
        return self.launched.schedule


class Steps:
    """The steps of one loop, in order."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, answers: Answers, counters: Counters) -> None:
        self.runner = runner
        self.masks = MaskWorker()
        self._scheduler = scheduler
        self._answers = answers
        self._counters = counters
        self._in_flight: _Step | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has been launched whose tokens were not collected yet."""
        return self._in_flight is not None

    def advance(self, on_launched: Callable[[], None]) -> None:
        """Launch the next step and collect the one before it; or, one at a time, launch and collect.

        on_launched: called where the loop goes on to wait for a step in flight.
        """
        schedule = self._scheduler.schedule()
        launched, error = self._launch(schedule) if schedule.num_tokens else (None, None)
        if self._in_flight is not None:
            on_launched()
            step, self._in_flight = self._in_flight, None
            self._collect(step)
        if error is not None:
            self._fail_step(schedule, error)
        if launched is None:
            return
        try:
            step = _Step(launched, self._draw(launched))
        except Exception as failure:
            self._fail_step(schedule, failure)
            return
        if self._scheduler.limits.max_steps_in_flight > 1:
            self._in_flight = step
        else:
            self._collect(step)

    def drop(self) -> None:
        """Forget the step in flight: all its requests have ended."""
        self._in_flight = None

    def _launch(self, schedule: Schedule) -> tuple[Launched | None, Exception | None]:
        now_s = time.perf_counter()
        for request in schedule.num_tokens:
            if request.times.scheduled_s is None:
                request.times.scheduled_s = now_s
        self._prefetch(request for request in schedule.num_tokens if request.num_pending_tokens <= 1)
        pending_ids = {} if self._in_flight is None else self._in_flight.draws.input_ids
        try:
            launched = self.runner.launch(schedule, pending_ids)
        except Exception as error:
            return None, error
        self._counters.count(schedule.total_tokens, len(schedule.num_tokens))
        return launched, None

    def _draw(self, launched: Launched) -> Draws:
        """Of all that are still wanted, knowing every token before."""
        drawn = [request for request in launched.rows if is_drawn(request)]
        self._prefetch(drawn)
        return self.runner.draw(launched, {request: self._answers.sampler(request) for request in drawn})

    def _prefetch(self, requests: Iterable[Request]) -> None:
        """Have the masks of requests computed whose tokens so far are all known."""
        samplers = map(self._answers.sampler, requests)
        self.masks.prefetch(sampler.matcher for sampler in samplers if sampler.matcher is not None)

    def _collect(self, step: _Step) -> None:
        try:
            choices = step.draws.wait()
        except Exception as error:
            self._fail_step(step.schedule, error)
            return
        for request in self._scheduler.update(step.schedule):
            try:
                if request in step.draws.logits:
                    self._scheduler.keep_end(request, step.draws.logits[request])
                self._answers.has_computed_prompt(request)
                if is_drawn(request):
                    choice = choices[request]
                    if isinstance(choice, Exception):
                        raise choice
                    self._answers.accept(request, *choice)
            except Exception as error:
                self._fail_choice(request, error)

    def _fail_choice(self, request: Request, error: Exception) -> None:
        is_known = isinstance(error, FloatingPointError | ConstraintError)
        trace = None if isinstance(error, ConstraintError) else error
        log.error("choosing a token failed (%s); request %s ends", error, request.request_id, exc_info=trace)
        message = str(error) if is_known else f"choosing a token failed ({type(error).__name__})"
        self._answers.fail([request], message, is_unanswerable=isinstance(error, ConstraintError))

    def _fail_step(self, schedule: Schedule, error: Exception) -> None:
        log.error("the forward pass failed; its %d requests end", len(schedule.num_tokens), exc_info=error)
        self._counters.num_failed_steps += 1
        self._answers.fail(schedule.num_tokens, f"the forward pass failed ({type(error).__name__})")


def is_drawn(request: Request) -> bool:
    """Whether a request that has caught up gets a token: it has not ended, and it is not only scored."""
    return request.state is RequestState.RUNNING and request.max_output_tokens > 0
