"""A known slowness, for testing the tools that should see it: each step made longer by a share of its own time."""

import time
from typing import Any

from pocketllm.engine.lifecycle.loop import EngineLoop


class SlowedLoop(EngineLoop):
    """The loop of an engine with `test_step_delay`: a share of 0.05 makes each step take 1.05 times as long."""

    def __init__(self, *parts: Any, share: float) -> None:
        super().__init__(*parts)
        assert share > 0, share
        self._share = share

    def step(self) -> bool:
        """A step, then the delay: awake, for a sleep ends later than asked by an amount that nobody knows."""
        start_s = time.perf_counter()
        is_work_left = super().step()
        end_s = time.perf_counter() + self._share * (time.perf_counter() - start_s)
        while time.perf_counter() < end_s:
            pass
        return is_work_left
