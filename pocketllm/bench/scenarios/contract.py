"""What a scenario says: the loads that a slot puts on its target, and which metrics carry the verdict.

A slot runs every point of its scenario, in order: first its burn-in, then its measured requests. A metric of a labelled
point is called `metric@label`, so that a record holds one series a metric and point.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from pocketllm.bench.latency import Timed, slot_values
from pocketllm.bench.targets.contract import Need
from pocketllm.errors import OptionError

__all__ = ["Arrivals", "Meter", "Need", "Planned", "Point", "Scenario"]

if TYPE_CHECKING:
    from pocketllm.bench.targets.contract import Ask, Sample


class Arrivals(Enum):
    """When the requests of a point leave."""

    CLOSED = "closed"
    """`concurrency` requests are in flight; the next leaves when one has ended."""
    WAVE = "wave"
    """All at once."""
    POISSON = "poisson"
    """At times drawn beforehand, whether or not earlier ones have ended; gaps are exponential."""


@dataclass(frozen=True)
class Planned:
    """One request of a point, before it has a text."""

    salt: str
    """Decides the text; requests with one salt are equal."""
    n_prompt: int
    n_out: int
    offset_s: float | None = None
    """When it is to be sent, from the start of the point; None: as soon as a place is free."""
    prefix_salt: str | None = None
    """Decides the first `n_prefix` prompt tokens; requests with one prefix salt share them."""
    n_prefix: int = 0
    json_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Point:
    """One load. Lengths in tokens; None: the scenario's."""

    label: str = ""
    n_prompt: int | None = None
    n_out: int | None = None
    spread: float = 0.0
    """Both lengths are drawn evenly from (1 − spread) to (1 + spread) times what is asked."""
    arrivals: Arrivals = Arrivals.CLOSED
    concurrency: int = 1
    rate_per_s: float | None = None
    """Mean arrivals a second of POISSON."""
    num_requests: int | None = None
    """Measured requests a slot; None: as many as calibration finds, the same for every arm."""
    n_prefix: int = 0
    """Leading prompt tokens from a text that the requests of one slot share."""
    warm_prefix: bool = False
    """Whether the burn-in brings that prefix too, so that a prefix cache holds it when measuring begins."""
    json_schema: Mapping[str, Any] | None = field(default=None, hash=False)
    judged: bool = True
    """Whether the scenario's judged metrics are judged at this point too."""

    def __post_init__(self) -> None:
        assert 0 <= self.spread < 1, self
        assert (self.arrivals is Arrivals.POISSON) == (self.rate_per_s is not None), self
        assert self.arrivals is Arrivals.CLOSED or self.num_requests, self

    @property
    def num_burnin(self) -> int:
        """Requests of a burn-in: twice the concurrency where more than one is in flight."""
        return 1 if self.concurrency == 1 else 2 * self.concurrency

    @property
    def longest(self) -> int:
        """Most tokens that one request can hold, prompt and answer; lengths are filled in."""
        return sum(round((n or 0) * (1 + self.spread)) for n in (self.n_prompt, self.n_out))

    @property
    def expects_cached(self) -> bool:
        """Whether cached prompt tokens are what is measured, so that a difference in them is no fault."""
        return self.warm_prefix

    def metric(self, name: str) -> str:
        """The metric's name at this point."""
        return f"{name}@{self.label}" if self.label else name

    def burnin(self, salt: str, share: float = 1.0) -> tuple[Planned, ...]:
        """The requests before the measured ones, each `share` as long; `concurrency` of them in flight."""
        steady = replace(self, spread=0.0, n_prefix=self.n_prefix if self.warm_prefix else 0)
        whole = [steady.planned(salt, f"burnin-{number}", random.Random(0), None) for number in range(self.num_burnin)]
        return tuple(
            replace(
                one, n_prompt=max(one.n_prefix + 1, round(one.n_prompt * share)), n_out=max(1, round(one.n_out * share))
            )
            for one in whole
        )

    def requests(self, salt: str, draw: str, count: int = 1) -> tuple[Planned, ...]:
        """The measured requests of one slot.

        salt: decides the texts, another one for each slot. draw: decides lengths and arrival times, the same for all
        arms of a block, so that they do the same work. count: requests where `num_requests` is None.
        """
        rng = random.Random(f"{draw}-{self.label}")
        offset_s: float | None = None if self.arrivals is Arrivals.CLOSED else 0.0
        found = []
        for number in range(self.num_requests or count):
            if self.rate_per_s is not None and offset_s is not None and number:
                offset_s += rng.expovariate(self.rate_per_s)
            found.append(self.planned(salt, str(number), rng, offset_s))
        return tuple(found)

    def planned(self, slot_salt: str, name: str, rng: random.Random, offset_s: float | None) -> Planned:
        """One request, its lengths drawn from `rng`."""
        assert self.n_prompt is not None, "lengths are filled in by Scenario.shapes"
        assert self.n_out is not None
        slot_salt = f"{slot_salt}-{self.label}" if self.label else slot_salt
        salt = f"{slot_salt}-{name}"
        n_prompt, n_out = (
            max(1, round(n * rng.uniform(1 - self.spread, 1 + self.spread))) for n in (self.n_prompt, self.n_out)
        )
        # without a warm prefix every request brings its own: as long, never cached
        prefix_salt = f"{slot_salt if self.warm_prefix else salt}-prefix" if self.n_prefix else None
        return Planned(salt, n_prompt, n_out, offset_s, prefix_salt, self.n_prefix, self.json_schema)


class Meter(Protocol):
    """Measures one arm where no request does: what stands in the record is a request and a sample all the same."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What readers of its samples need, for `meter` in the run document; asked once, before the first slot."""

    def __call__(self, point: Point, salt: str) -> "Sequence[tuple[Ask, Sample]]":
        """One slot's point."""


@dataclass(frozen=True)
class Scenario:
    """Loads and metrics. `judged` metrics get a verdict at every point, `shown` ones are told without a word."""

    name: str
    about: str
    n_prompt: int
    n_out: int
    judged: tuple[str, ...]
    shown: tuple[str, ...] = ()
    burnin: float = 1.0
    """Length of a burn-in request, as a share of a measured one."""
    points: tuple[Point, ...] = (Point(),)
    point_words: str = "at {}"
    """How a sentence names a point: its label goes between the braces."""
    slos: Mapping[str, float] = field(default_factory=dict)
    """Upper limits in seconds of a request's ttft, tpot and e2el: one that meets all of them counts for goodput."""
    needs: frozenset[Need] = frozenset()
    meters: Callable[[Mapping[str, Any]], Mapping[str, "Meter"]] | None = None
    """Targets by arm → what measures a slot of each, for a scenario that is not made of requests; asked once a run."""
    costs: Callable[[Sequence[Timed], Mapping[str, float]], Mapping[str, float]] = slot_values
    """(samples of one slot's point, slos) → cost by metric."""

    @property
    def primary(self) -> tuple[str, ...]:
        """Full names of the judged metrics, each at every point."""
        return tuple(point.metric(name) for name in self.judged for point in self.points if point.judged)

    @property
    def also(self) -> tuple[str, ...]:
        """Full names of the metrics that are only shown."""
        silent = [point.metric(name) for name in self.judged for point in self.points if not point.judged]
        return (*silent, *(point.metric(name) for name in self.shown for point in self.points))

    @property
    def shapes(self) -> tuple[Point, ...]:
        """The points with their lengths filled in."""
        return tuple(
            replace(point, n_prompt=point.n_prompt or self.n_prompt, n_out=point.n_out or self.n_out)
            for point in self.points
        )

    def resized(self, n_prompt: int | None, n_out: int | None) -> "Scenario":
        """With other lengths: a shared prefix keeps its share; points that differ in the prompt's length become one."""
        points = self.points
        if n_prompt is not None and any(point.n_prompt is not None for point in points):
            points = (replace(points[0], n_prompt=None, label=""),)
        if n_prompt is not None:
            share = n_prompt / self.n_prompt
            points = tuple(replace(point, n_prefix=round(point.n_prefix * share)) for point in points)
        if n_out is not None:
            points = tuple(replace(point, n_out=None) for point in points)
        return replace(self, n_prompt=n_prompt or self.n_prompt, n_out=n_out or self.n_out, points=points)

    def at(self, labels: Sequence[str]) -> "Scenario":
        """Only these points, in the scenario's order; OptionError names the known ones."""
        known = [point.label for point in self.points if point.label]
        unknown = [label for label in labels if label not in known]
        if unknown:
            have = f"points of {self.name}: {', '.join(known)}" if known else f"{self.name} has a single point"
            raise OptionError(f"no point {unknown[0]!r}; {have}")
        return replace(self, points=tuple(point for point in self.points if point.label in labels))

    def within(self, max_model_len: int) -> tuple["Scenario", tuple[str, ...]]:
        """The points whose longest request fits, and the labels of those left out; OptionError when none fits."""
        fits = [shape.longest <= max_model_len for shape in self.shapes]
        fitting = tuple(point for point, fit in zip(self.points, fits, strict=True) if fit)
        if not fitting:
            shortest = min(shape.longest for shape in self.shapes)
            raise OptionError(
                f"{self.name} needs {shortest} tokens of context, prompt and answer together, and max_model_len is "
                f"{max_model_len}: lower --input-len or --output-len"
            )
        left_out = tuple(point.label for point, fit in zip(self.points, fits, strict=True) if not fit)
        return replace(self, points=fitting), left_out

    def refusal(self, arm: str, has: frozenset[Need]) -> str | None:
        """Why a target that has only these abilities cannot run it, in one sentence; None when it can."""
        missing = sorted(need.value for need in self.needs - has)
        return f"scenario {self.name} needs {' and '.join(missing)}, which arm {arm} does not have" if missing else None
