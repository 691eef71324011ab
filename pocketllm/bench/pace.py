"""How much a run does in its time: what calibration allows, and what to give up when the machine becomes slower."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pocketllm.bench.schedule import (
    MAX_BLOCKS,
    MAX_BUDGET_BLOCKS,
    MIN_BLOCKS,
    SHORT_BURNIN,
    Costs,
    Fitted,
    Slot,
    default_blocks,
    row_set_size,
    whole_row_sets,
)
from pocketllm.errors import OptionError

OVERRUN = 1.25
"""Share of its budget that a run may come to need before it changes its pace at a row set's end."""


@dataclass(frozen=True)
class Wish:
    """What was asked of a run's length. `blocks` None: by the budget, or the default; `requests` None: by calibration.

    until: stop once the widest judged interval is ± this share, at the end of a row set and after `min_n` blocks.
    runs: how many share the budget that was asked for; budget_s is what one of them has.
    """

    num_arms: int
    starts: int = 1
    blocks: int | None = None
    budget_s: float | None = None
    requests: int | None = None
    until: float | None = None
    min_n: int = MIN_BLOCKS
    runs: int = 1

    @property
    def unit(self) -> int:
        """Blocks that go together: a row set for each start."""
        return row_set_size(self.num_arms) * self.starts

    def planned_blocks(self) -> int:
        """Blocks asked for, or the default, or the most that `until` may take; OptionError below the minimum."""
        fewest = whole_row_sets(MIN_BLOCKS, self.num_arms, self.starts)
        if fewest > MAX_BLOCKS:
            raise OptionError(f"--starts {self.starts} make {fewest} blocks of it, above {MAX_BLOCKS}: take fewer")
        if self.blocks is None:
            most = whole_row_sets(MAX_BUDGET_BLOCKS, self.num_arms, self.starts)
            return default_blocks(self.num_arms, self.starts) if self.until is None else most
        if self.blocks < MIN_BLOCKS:
            raise OptionError(f"--blocks {self.blocks} is below {MIN_BLOCKS}, the fewest that can be judged")
        if self.blocks > MAX_BLOCKS:
            raise OptionError(f"--blocks {self.blocks} is above {MAX_BLOCKS}, more than anybody waits for")
        return whole_row_sets(self.blocks, self.num_arms, self.starts)

    def fit(self, costs: Costs, burnin: float, spent_s: float) -> Fitted:
        """Blocks and requests a slot, by `--blocks` or by the budget that is left; OptionError when it cannot hold."""
        if self.budget_s is None or self.blocks is not None:
            blocks = self.planned_blocks()
            requests = self.requests or costs.default_requests()
            needed = costs.seconds(blocks, requests, burnin, self.starts)
            if self.budget_s is not None and needed > self.budget_s - spent_s:
                raise OptionError(f"{blocks} blocks need about {minutes(needed + spent_s)}: more than --budget allows")
            return Fitted(blocks, requests, burnin, needed, self.starts)
        fitted = costs.fit(self.budget_s - spent_s, burnin, self.requests, self.starts)
        if fitted is None:
            raise self.refusal(costs.minimum_s(self.requests, self.starts) + spent_s)
        return fitted

    def refuse_early(self, costs: Costs, spent_s: float) -> None:
        """Do not warm up what is left for a budget that cannot even hold arms as quick as the quickest so far.

        Of an arm that has not answered every point, `costs` may hold what the others took.
        """
        quickest = min(costs.request_s)
        least = replace(costs, request_s=(quickest,) * self.num_arms).minimum_s(self.requests, self.starts)
        if self.budget_s is not None and spent_s + least > self.budget_s:
            raise self.refusal(spent_s + least, "at least about")

    def refusal(self, needed_s: float, word: str = "about") -> OptionError:
        """Why a budget cannot hold a run, and what would."""
        fewest = whole_row_sets(MIN_BLOCKS, self.num_arms, self.starts)
        starts, fewer = (f" in {self.starts} starts", "take fewer --starts ") if self.starts > 1 else ("", "")
        budget_s = self.budget_s or 0.0
        budget = f"{budget_s * self.runs:g}s, {budget_s:g}s a run," if self.runs > 1 else f"{budget_s:g}s"
        return OptionError(
            f"--budget {budget} cannot hold {fewest} blocks of {self.num_arms} arms{starts}, the fewest that "
            f"can be judged: they need {word} {minutes(needed_s)} here; raise --budget, {fewer}or ask for less"
        )


class Pace:
    """Watches a run against its budget, from the first slot on."""

    def __init__(self, wish: Wish, start_s: float, tell: Callable[[str], None]) -> None:
        """start_s: `time.perf_counter()` when the budget began to count."""
        self.wish = wish
        self.tell = tell
        self._start_s = start_s
        self._begun_s = time.perf_counter()

    def left_s(self, done: int, total: int) -> float:
        """What the remaining slots will take, at the pace so far."""
        return (time.perf_counter() - self._begun_s) / max(done, 1) * (total - done)

    def at_row_set(self, fitted: Fitted, slot: Slot, num_slots: int) -> Fitted | None:
        """How to go on before a row set's first slot when the budget would be overrun; None: there are enough blocks.

        Before the minimum is reached the slots of all arms become short instead: fewer requests, never fewer blocks.
        """
        budget_s, k = self.wish.budget_s, self.wish.num_arms
        spent_s = time.perf_counter() - self._start_s
        if budget_s is None or spent_s + self.left_s(slot.index, num_slots) <= OVERRUN * budget_s:
            return fitted
        if slot.block >= MIN_BLOCKS:
            row_set_s = self.left_s(slot.index, slot.index + row_set_size(k) * k)
            if spent_s + row_set_s <= OVERRUN * budget_s:
                return fitted
            self.tell("stopped at the end of a row set: the machine became slower than its calibration")
            return None
        short = replace(fitted, requests=self.wish.requests or 1, burnin=min(fitted.burnin, SHORT_BURNIN))
        if short != fitted:
            self.tell(f"the machine became slower than its calibration: short slots from block {slot.block} on")
        return short


def minutes(seconds: float) -> str:
    """A duration for people.

    >>> minutes(42), minutes(150)
    ('42 s', '2.5 min')
    """
    return f"{math.ceil(seconds)} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def plan_words(fitted: Fitted, num_arms: int) -> str:
    """What will run, in half a sentence."""
    starts = f" in {fitted.starts} starts" if fitted.starts > 1 else ""
    return f"{fitted.blocks} blocks of {num_arms} slots{starts}, measured requests a slot: {fitted.requests}"
