"""From requests to slot values: one number for each metric, block and arm; pure."""

import re
from collections.abc import Sequence

import numpy as np

from pocketllm.bench import latency
from pocketllm.bench.analysis.validity import Measured
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import Slot
from pocketllm.bench.targets.contract import Sample

Table = dict[tuple[str, int, str], float]
"""Cost by (full metric name, block, arm)."""

QUANTILE_METRIC = re.compile(r"(?P<word>[a-z][a-z0-9_]*)_p(?P<percent>[1-9]\d|9\d\d)")
"""`ttft_p99`, `itl_p95`, `e2el_p999`: a quantile over the requests of one slot."""


def slot_table(scenario: Scenario, measured: Sequence[Measured]) -> Table:
    """The value of every slot and metric of the scenario; what its requests cannot show is absent.

    A value is the median over the slot's requests, or what the metric's definition says; a quantile metric is computed
    inside each slot, never over pooled ones, and is absent where the slot has too few requests for it.
    """
    grouped: dict[tuple[str, int, str], list[Sample]] = {}
    for item in measured:
        grouped.setdefault((item.point, item.block, item.arm), []).append(item.sample)
    wanted = {*scenario.primary, *scenario.also}
    words = {name.partition("@")[0] for name in wanted}
    table: Table = {}
    for (point, block, arm), samples in grouped.items():
        values = {**scenario.costs(samples, scenario.slos), **quantiles(samples, words)}
        for word, cost in values.items():
            name = f"{word}@{point}" if point else word
            if name in wanted:
                table[name, block, arm] = cost
    return table


def quantile_name(metric: str) -> tuple[str, float] | None:
    """Word and quantile of a quantile metric; None for any other.

    >>> quantile_name("ttft_p99"), quantile_name("itl_p999"), quantile_name("ttft_p100")
    (('ttft', 0.99), ('itl', 0.999), None)
    """
    found = QUANTILE_METRIC.fullmatch(metric)
    return None if found is None else (found["word"], int(found["percent"]) / 10 ** len(found["percent"]))


def quantiles(samples: Sequence[Sample], metrics: set[str]) -> dict[str, float]:
    """Values of the quantile metrics among `metrics` that one slot has requests enough for."""
    found = {}
    for metric in metrics:
        named = quantile_name(metric)
        quantile = named and latency.quantile_of(costs_of(samples, named[0]), named[1])
        if quantile and quantile.value:
            found[metric] = quantile.value
    return found


def costs_of(samples: Sequence[Sample], word: str) -> list[float]:
    """Costs of single requests (or of all their gaps, for `itl`) by a latency word."""
    good = [sample for sample in samples if sample.error is None]
    if word == "itl":
        return [gap for sample in good for gap in latency.gaps_s(sample)]
    read = latency.WORDS[word]
    return [cost for sample in good if (cost := read(sample)) is not None]


def quantile_notes(scenario: Scenario, measured: Sequence[Measured]) -> list[str]:
    """One line for each quantile metric that slots have too few requests for: `n/a (80 < 299)` and the maximum."""
    notes = []
    for metric in (*scenario.primary, *scenario.also):
        word, _, point = metric.partition("@")
        named = quantile_name(word)
        by_slot: dict[tuple[int, str], list[Sample]] = {}
        for item in measured if named else ():
            if item.point == point:
                by_slot.setdefault((item.block, item.arm), []).append(item.sample)
        found = [
            (arm, quantile)
            for (_, arm), samples in by_slot.items()
            if named and (quantile := latency.quantile_of(costs_of(samples, named[0]), named[1]))
        ]
        refused = [(arm, quantile) for arm, quantile in found if quantile.value is None]
        if refused:
            arm, quantile = max(refused, key=lambda pair: pair[1].maximum)
            fewest = min((quantile for _, quantile in refused), key=lambda quantile: quantile.n)
            notes.append(f"{metric}: {fewest.refusal}; the maximum was {quantile.maximum * 1e3:.3g} ms ({arm})")
    return notes


def missing_blocks(scenario: Scenario, slots: Sequence[Slot], table: Table) -> set[int]:
    """Blocks in which an arm has no value for a primary metric."""
    wanted = ((metric, slot.block, slot.arm) for slot in slots for metric in scenario.primary)
    return {key[1] for key in wanted if key not in table}


def missing_notes(scenario: Scenario, slots: Sequence[Slot], measured: Sequence[Measured], table: Table) -> list[str]:
    """One line for each primary metric and arm whose requests succeeded and show no such value: why blocks are lost."""
    good = {(item.block, item.arm) for item in measured if item.sample.error is None}
    found: dict[tuple[str, str], int] = {}
    for slot in slots:
        for metric in scenario.primary:
            if quantile_name(metric.partition("@")[0]):
                continue  # its own note says so
            if (metric, slot.block, slot.arm) not in table and (slot.block, slot.arm) in good:
                found[metric, slot.arm] = found.get((metric, slot.arm), 0) + 1
    return [f"{metric}: {count} slots of {arm} show no such value" for (metric, arm), count in found.items()]


def medians(
    scenario: Scenario, names: Sequence[str], table: Table, valid: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Median cost over the valid blocks, by metric and arm."""
    found: dict[str, dict[str, float]] = {}
    for metric in (*scenario.primary, *scenario.also):
        for name in names:
            values = [table[metric, block, name] for block in valid if (metric, block, name) in table]
            if values:
                found.setdefault(metric, {})[name] = float(np.median(values))
    return found
