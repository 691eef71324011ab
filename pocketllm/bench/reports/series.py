"""What pictures and tables are drawn from, computed from a record's document and rows; measures nothing."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pocketllm.bench import latency
from pocketllm.bench.latency import Quantile, Timing
from pocketllm.bench.scenarios import find_scenario, known
from pocketllm.bench.scenarios.contract import Scenario

Row = Mapping[str, Any]
QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MAX_STRIP_POINTS = 400


@dataclass(frozen=True)
class Bar:
    """One slot on the run's clock, in seconds since the first request that was kept."""

    slot: int
    block: int
    start: int
    arm: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Strip:
    """A condition of the machine over the run's clock."""

    name: str
    unit: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Spread:
    """An arm's value at one point of a scenario: median, least and most over blocks, as costs."""

    label: str
    arm: str
    median: float
    low: float
    high: float


STRIPS = (
    ("cpu_freq", "CPU clock", "MHz"),
    ("gpu_clk_sm", "GPU clock", "MHz"),
    ("gpu_temp", "GPU temperature", "°C"),
    ("gpu_power", "GPU power", "W"),
)


class Series:
    """One bench record, read for pictures. Rows of an unfinished run give what they have."""

    def __init__(self, document: Mapping[str, Any], rows: Sequence[Row] = ()) -> None:
        self.document = document
        self.rows = rows
        self.arms = [str(arm["name"]) for arm in document.get("arms") or []]

    @cached_property
    def scenario(self) -> Scenario | None:
        """The scenario of that name, if this version knows it."""
        name = str(self.document.get("scenario"))
        return find_scenario(name) if name in known() else None

    @cached_property
    def measured(self) -> list[Row]:
        """Rows of measured requests."""
        return [row for row in self.rows if row.get("phase") == "measure" and row.get("block") is not None]

    @cached_property
    def slots(self) -> dict[tuple[str, int, str], list[Timing]]:
        """Measured requests by (point, block, arm)."""
        found: dict[tuple[str, int, str], list[Timing]] = {}
        for row in self.measured:
            found.setdefault((row.get("point") or "", row["block"], row["arm"]), []).append(Timing.of_row(row))
        return found

    @cached_property
    def table(self) -> dict[tuple[str, int, str], float]:
        """Cost by (full metric name, block, arm)."""
        costs = self.scenario.costs if self.scenario else latency.slot_values
        slos = (self.document.get("workload") or {}).get("slos") or (self.scenario.slos if self.scenario else {})
        found = {}
        for (point, block, arm), requests in self.slots.items():
            for name, cost in costs(requests, slos).items():
                found[f"{name}@{point}" if point else name, block, arm] = cost
        return found

    @cached_property
    def points(self) -> list[str]:
        """Labels of the points that were measured, in the order they were run."""
        return list(dict.fromkeys(point for point, _, _ in self.slots))

    @property
    def num_blocks(self) -> int:
        """Valid blocks; of an unfinished run those that every arm has."""
        recorded = self.document.get("valid_blocks")
        if recorded is not None:
            return int(recorded)
        by_block: dict[int, set[str]] = {}
        for _, block, arm in self.slots:
            by_block.setdefault(block, set()).add(arm)
        return sum(arms == set(self.arms) for arms in by_block.values())

    def costs(self, metric: str, arm: str) -> dict[int, float]:
        """Cost of one arm by block."""
        return {block: cost for (name, block, who), cost in sorted(self.table.items()) if (name, who) == (metric, arm)}

    def differences(self, metric: str, arm: str) -> list[tuple[int, float]]:
        """(block, ln cost of the arm − ln cost of the baseline) for every block that has both."""
        base, other = self.costs(metric, self.arms[0]), self.costs(metric, arm)
        return [(block, math.log(other[block] / base[block])) for block in sorted(base.keys() & other.keys())]

    def medians(self) -> dict[str, dict[str, float]]:
        """The document's medians, or those of the rows where the run did not come to its end."""
        recorded = self.document.get("medians")
        if recorded:
            return {metric: dict(values) for metric, values in recorded.items()}
        measured = dict.fromkeys(name for name, _, _ in self.table)
        wanted = (*self.scenario.primary, *self.scenario.also) if self.scenario else tuple(measured)
        if self.scenario and not measured.keys() & set(wanted):  # run with lengths of its own, so without labels
            wanted = tuple(name for name in measured if name in (*self.scenario.judged, *self.scenario.shown))
        found = {}
        for metric in wanted:
            values = {arm: list(self.costs(metric, arm).values()) for arm in self.arms}
            found[metric] = {arm: statistics.median(costs) for arm, costs in values.items() if costs}
        return {metric: values for metric, values in found.items() if values}

    # -- over the run's clock ------------------------------------------------------------------------------------------
    def timeline(self) -> list[Bar]:
        """Every slot as a bar from its first send to its last chunk, burn-in included."""
        spans: dict[int, list[int]] = {}
        about: dict[int, Row] = {}
        for row in self.rows:
            ends = [row[name] for name in ("t_send_ns", "t_last_ns") if row.get(name) is not None]
            if row.get("slot") is not None and ends:
                spans.setdefault(row["slot"], []).extend(ends)
                about[row["slot"]] = row
        if not spans:
            return []
        zero = min(map(min, spans.values()))
        return [
            Bar(
                slot,
                about[slot]["block"],
                about[slot].get("start") or 0,
                about[slot]["arm"],
                (min(stamps) - zero) / 1e9,
                (max(stamps) - zero) / 1e9,
            )
            for slot, stamps in sorted(spans.items())
        ]

    def strips(self) -> list[Strip]:
        """Conditions that were recorded, over the same clock as the timeline."""
        stamps = [row["t_send_ns"] for row in self.rows if row.get("slot") is not None and row.get("t_send_ns")]
        found = []
        for column, name, unit in STRIPS:
            points = [
                ((row["t_send_ns"] - min(stamps)) / 1e9, float(row[column]))
                for row in self.rows
                if row.get("slot") is not None and row.get(column) is not None and row.get("t_send_ns")
            ]
            if len(points) > 1:
                step = -(-len(points) // MAX_STRIP_POINTS)
                found.append(Strip(name, unit, tuple(sorted(points)[::step])))
        return found

    # -- over points ---------------------------------------------------------------------------------------------------
    def curve(self, name: str) -> list[Spread]:
        """A metric at each labelled point and arm, over blocks."""
        found = []
        for label in self.points:
            for arm in self.arms:
                costs = list(self.costs(f"{name}@{label}", arm).values())
                if label and costs:
                    found.append(Spread(label, arm, statistics.median(costs), min(costs), max(costs)))
        return found

    def curves(self) -> dict[str, list[Spread]]:
        """`curve` of each of the scenario's metrics, where there are two points or more; operations have none."""
        if len([label for label in self.points if label]) < 2 or self.is_operations:
            return {}
        names = (*self.scenario.judged, *self.scenario.shown) if self.scenario else ()
        found = {name: self.curve(name) for name in names}
        return {name: spreads for name, spreads in found.items() if spreads}

    def achieved(self, point: str, arm: str) -> float | None:
        """Median over blocks of the mean number of requests in flight."""
        values = [
            value
            for (label, _, who), requests in self.slots.items()
            if (label, who) == (point, arm) and (value := latency.achieved_concurrency(requests)) is not None
        ]
        return statistics.median(values) if values else None

    @property
    def latency_words(self) -> tuple[str, ...]:
        """The words worth a line: one token has nothing after it, and with many points the main two do."""
        if all(request.n_out <= 1 for requests in self.slots.values() for request in requests):
            return ("ttft",)
        if self.has_schedule:
            return (*LATENCIES, "late")
        return ("ttft", "tpot") if len(self.points) > 1 else LATENCIES

    @property
    def has_schedule(self) -> bool:
        """Whether requests were to be sent at times set beforehand."""
        points = (self.document.get("workload") or {}).get("points") or []
        return any(point.get("arrivals", "closed") != "closed" for point in points)

    def quantiles(self, word: str, point: str, arm: str) -> list[Quantile]:
        """QUANTILES of a latency word: computed in each slot, then the median over slots; never pooled."""
        slots = [requests for (label, _, who), requests in self.slots.items() if (label, who) == (point, arm)]
        values = [word_values(word, requests) for requests in slots]
        found = []
        for quantile in QUANTILES:
            some = [one for slot in values if (one := latency.quantile_of(slot, quantile)) is not None]
            if some:
                told = [one.value for one in some if one.value is not None]
                middle = statistics.median(told) if len(told) == len(some) else None
                found.append(Quantile(quantile, min(one.n for one in some), middle, max(one.maximum for one in some)))
        return found

    # -- operations ----------------------------------------------------------------------------------------------------
    @property
    def is_operations(self) -> bool:
        """Whether the record's samples are operations, not requests."""
        return self.document.get("scenario") == "op_latency"

    @property
    def meter(self) -> Mapping[str, Any]:
        """What the baseline's meter told of its samples: bytes and operations of the cases, ceilings."""
        found: Mapping[str, Any] = (self.document.get("meter") or {}).get(self.arms[0]) or {}
        return found

    def operations(self) -> dict[str, dict[str, float]]:
        """Seconds of one call by case and arm: the median over blocks."""
        from pocketllm.bench.scenarios.op_latency import call_s

        found: dict[str, dict[str, list[float]]] = {}
        for row in self.measured:
            timing = Timing.of_row(row)
            if timing.error is None and timing.chunk_ntok:
                found.setdefault(str(row["prompt_id"]), {}).setdefault(row["arm"], []).append(call_s(timing))
        return {case: {arm: statistics.median(costs) for arm, costs in arms.items()} for case, arms in found.items()}


def word_values(word: str, requests: Iterable[Timing]) -> list[float]:
    """A latency word of every request that has it; chunk gaps are those of all requests together."""
    good = [request for request in requests if request.error is None]
    if word == "late":
        return [latency.late_s(request) for request in good]
    if word == "itl":
        return [gap for request in good for gap in latency.gaps_s(request)]
    return [value for request in good if (value := latency.WORDS[word](request)) is not None]
