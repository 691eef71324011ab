"""A known slowness, for testing the tools that should see it: each step's forward made longer by a share of itself."""

import time

from pocketllm.engine.lifecycle.loop import StepRunner
from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.runner import LogitsRow
from pocketllm.engine.lifecycle.scheduler import Schedule


class SlowedRunner:
    """The runner of an engine with `test_step_delay`: a share of 0.05 makes each forward take 1.05 times as long.

    The delay comes before anything is sampled, so that it is in the time to the first token as in every later gap. What
    a step does beside its forward is not made longer.
    """

    def __init__(self, runner: StepRunner, share: float) -> None:
        assert share > 0, share
        self._runner = runner
        self._share = share

    def run(self, schedule: Schedule) -> dict[Request, LogitsRow]:
        """The forward, then the delay: awake, for a sleep ends later than asked by an amount that nobody knows."""
        start_s = time.perf_counter()
        logits = self._runner.run(schedule)
        end_s = time.perf_counter() + self._share * (time.perf_counter() - start_s)
        while time.perf_counter() < end_s:
            pass
        return logits
