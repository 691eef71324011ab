"""One slot's work: at each point of the scenario its burn-in, then its measured requests, kept as rows and samples."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pocketllm.bench.analysis.validity import Measured
from pocketllm.bench.arm import Arm
from pocketllm.bench.record import row_of
from pocketllm.bench.scenarios.contract import Arrivals, Meter, Planned, Point, Scenario
from pocketllm.bench.scenarios.prompts import ask_of
from pocketllm.bench.schedule import Slot
from pocketllm.bench.targets.contract import Ask, Sample, Target
from pocketllm.bench.targets.rig import Rig
from pocketllm.errors import NotJudgedError
from pocketllm.evidence.provenance import readings

Requests = list[tuple[Ask, Sample]]


@dataclass(frozen=True)
class Amount:
    """How much of each point: measured requests where the point leaves that open, and the burn-in's share."""

    requests: int
    burnin: float


@dataclass
class Place:
    """Where requests stand: in a slot, or before the first one (`slot` None), and in which phase."""

    arm: Arm
    slot: Slot | None
    phase: str
    start: int = 0
    number: int = 0
    """Which of several slots of this phase, where there is no slot to tell."""

    @property
    def seed_part(self) -> str:
        """What makes the texts of this slot others than those of any other."""
        if self.slot is not None:
            return str(self.slot.index)
        return f"{self.phase}-{self.start}-{self.number}-{self.arm.name}"


@dataclass
class SlotLoad:
    """Puts a scenario's loads on targets and keeps what they showed."""

    scenario: Scenario
    rig: Rig
    seed: int
    meters: Mapping[str, Meter] = field(default_factory=dict)
    machine: readings.Meter = field(default_factory=readings.Meter)
    rows: list[dict[str, Any]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    num_requests: int = 0

    def run(self, place: Place, amount: Amount, points: Sequence[Point] | None = None) -> Requests:
        """One slot: all points of the scenario in order, or some; gives the measured requests."""
        found: Requests = []
        for point in self.scenario.shapes if points is None else points:
            burnin, measured = self.at_point(place, point, amount)
            state = self.reading(self.rig.targets[place.arm.name])
            self.keep(place, "burnin", point, burnin, {})
            self.keep(place, place.phase, point, measured, state)
            if place.phase == "measure" and place.slot is not None:
                self.measured += [measured_of(place.slot, point, ask, sample, state) for ask, sample in measured]
            found += measured
        return found

    def at_point(self, place: Place, point: Point, amount: Amount) -> tuple[Requests, Requests]:
        """Burn-in and measured requests; between the two nothing drains where several are kept in flight."""
        salt = f"{self.scenario.name}-{self.seed}-{place.seed_part}"
        if self.meters:
            return [], [filled(ask, sample) for ask, sample in self.meters[place.arm.name](point, salt)]
        target = self.rig.targets[place.arm.name]
        # the same lengths and arrival times for every arm of a block
        draw = f"{self.seed}-{place.phase if place.slot is None else place.slot.block}"
        burnin = self.asks(point.burnin(salt, amount.burnin))
        measured = self.asks(point.requests(salt, draw, amount.requests))
        if point.arrivals is Arrivals.CLOSED and point.concurrency > 1:
            samples = target.load([*burnin, *measured], point.concurrency)
            return pairs(burnin, samples[: len(burnin)]), pairs(measured, samples[len(burnin) :])
        warm = target.load(burnin, point.concurrency)
        return pairs(burnin, warm), pairs(measured, target.load(measured, point.concurrency))

    def asks(self, planned: Sequence[Planned]) -> list[Ask]:
        """Requests with their texts."""
        return [ask_of(one, self.rig.encode, self.rig.decode) for one in planned]

    def probe(self, place: Place) -> Sample:
        """The first request of an arm, as long as the first point's; one text for all, whose answers are compared."""
        point = self.scenario.shapes[0]
        assert point.n_prompt is not None
        assert point.n_out is not None
        [ask] = self.asks([Planned(f"{self.scenario.name}-{self.seed}-agreement", point.n_prompt, point.n_out)])
        sample = self.rig.targets[place.arm.name].probe(ask)
        self.keep(place, place.phase, point, [(ask, sample)], {})
        return sample

    def keep(self, place: Place, phase: str, point: Point, requests: Requests, state: Mapping[str, Any]) -> None:
        """Requests as rows of the record; before the first slot all of them are warm-up."""
        for ask, sample in requests:
            told = phase if place.slot is not None or place.phase == "soak" else "warmup"
            row = row_of(place.arm, place.slot, told, self.num_requests, ask, sample)
            row |= {"start": place.start, "point": point.label, "offered": offered(point), **state}
            self.rows.append(row)
            self.num_requests += 1

    def reading(self, target: Target) -> dict[str, Any]:
        """The machine's state after a point, with the memory of the process that served it."""
        state = self.machine.read()
        if target.pid != os.getpid():
            state.pop("rss", None)
            rss = None if target.pid is None else resident_bytes(target.pid)
            state |= {} if rss is None else {"rss": rss}
        return state

    def taken_rows(self) -> list[dict[str, Any]]:
        """Rows since the last call, for the record."""
        rows, self.rows = self.rows, []
        return rows


def pairs(asks: Sequence[Ask], samples: Sequence[Sample]) -> Requests:
    """Each request with what it showed."""
    return list(zip(asks, samples, strict=True))


def filled(ask: Ask, sample: Sample) -> tuple[Ask, Sample]:
    """A meter's sample: it read no prompt, so it read all that was asked and found nothing cached."""
    sample.n_prompt = len(ask.prompt_token_ids)
    sample.n_cached = 0
    return ask, sample


def offered(point: Point) -> int:
    """Requests that a point keeps in flight, or sends at once."""
    if point.arrivals is Arrivals.WAVE:
        return point.num_requests or 1
    return point.concurrency


def measured_of(slot: Slot, point: Point, ask: Ask, sample: Sample, state: Mapping[str, Any]) -> Measured:
    """A measured request as the analysis wants it."""
    return Measured(
        block=slot.block,
        arm=slot.arm,
        sample=sample,
        start=slot.start,
        point=point.label,
        asked=(len(ask.prompt_token_ids), ask.max_tokens),
        offered=offered(point),
        warm=point.expects_cached,
        throttle_mask=state.get("throttle_mask"),
        loop_lag_ms=sample.loop_lag_ms,
        compiles=sample.compiles,
    )


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process and all that it started; None when it is gone or not ours to read."""
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(int(one.memory_info().rss) for one in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None


def answered(arm: Arm, sample: Sample) -> Sample:
    """The sample of a warm-up request; NotJudgedError when it failed: nothing can be timed."""
    if sample.error is not None:
        raise NotJudgedError(f"arm {arm.name} does not answer: {sample.error}")
    return sample
