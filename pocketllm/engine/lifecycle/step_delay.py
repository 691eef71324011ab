"""A known slowness, for testing the tools that should see it: each step's forward made longer by a share of itself."""

import time
from collections.abc import Callable, Mapping

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Schedule
from pocketllm.engine.lifecycle.steps.pipeline import StepRunner
from pocketllm.engine.lifecycle.steps.runner import Draws, Launched


class SlowedRunner:
    """The runner of an engine with `test_step_delay`: a share of 0.05 makes each forward take 1.05 times as long.

    The delay comes before anything is sampled, so that it is in the time to the first token as in every later gap. What
    a step does beside its forward is not made longer.
    """

    def __init__(self, runner: StepRunner, share: float, synchronize: Callable[[], None]) -> None:
        """synchronize: the backend's `Ops.synchronize`; a forward is over when that returns."""
        assert share > 0, share
        self._runner = runner
        self._share = share
        self._synchronize = synchronize

    def launch(self, schedule: Schedule, pending_ids: Mapping[Request, int]) -> Launched:
        """The forward, then the delay: awake, for a sleep ends later than asked by an amount that nobody knows."""
        self._synchronize()
        start_s = time.perf_counter()
        launched = self._runner.launch(schedule, pending_ids)
        self._synchronize()
        end_s = time.perf_counter() + self._share * (time.perf_counter() - start_s)
        while time.perf_counter() < end_s:
            pass
        return launched

    def draw(self, launched: Launched, samplers: Mapping[Request, Sampler]) -> Draws:
        """As without a delay."""
        return self._runner.draw(launched, samplers)
