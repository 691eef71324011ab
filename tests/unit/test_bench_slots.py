"""Slot values: medians over requests, quantiles inside each slot and only where there are requests enough."""

from dataclasses import replace

import numpy as np
import pytest

from pocketllm.bench.analysis.slots import medians, missing_blocks, missing_notes, quantile_notes, slot_table
from pocketllm.bench.analysis.validity import Measured
from pocketllm.bench.scenarios import find_scenario
from pocketllm.bench.schedule import order
from pocketllm.bench.targets.contract import Sample

SCENARIO = replace(find_scenario("decode"), judged=("ttft_p90",), shown=("ttft", "itl_p99"))
MS = 1_000_000


def request(ttft_ms: float, gap_ms: float = 10.0) -> Sample:
    """Four tokens, the first after ttft_ms."""
    times = [round((ttft_ms + gap_ms * number) * MS) for number in range(4)]
    return Sample(0, 0, 0, times[0], times, [1] * 4, n_prompt=16, n_cached=0, n_out=4, finish="length")


def measured(count: int, block: int = 0, arm: str = "base", point: str = "") -> list[Measured]:
    return [Measured(block, arm, request(10.0 + number), point=point) for number in range(count)]


def test_a_quantile_metric_is_the_quantile_of_each_slot() -> None:
    table = slot_table(SCENARIO, [*measured(29), *measured(40, block=1)])

    assert table["ttft_p90", 0, "base"] == pytest.approx(np.quantile(np.arange(10, 39), 0.9) / 1e3)
    assert table["ttft_p90", 1, "base"] == pytest.approx(np.quantile(np.arange(10, 50), 0.9) / 1e3)
    assert table["ttft", 0, "base"] == pytest.approx(0.024)


def test_a_slot_with_too_few_requests_has_no_quantile_and_says_so_with_its_maximum() -> None:
    items = measured(28)
    table = slot_table(SCENARIO, items)

    assert ("ttft_p90", 0, "base") not in table
    assert ("ttft", 0, "base") in table
    assert missing_blocks(SCENARIO, order(["base", "null"], 2, 1)[:1], table) == {0}
    notes = quantile_notes(SCENARIO, items)
    assert "ttft_p90: n/a (28 < 29); the maximum was 37 ms (base)" in notes
    assert any(note.startswith("itl_p99: n/a (84 < 299)") for note in notes)  # three gaps a request


def test_requests_of_several_slots_are_never_pooled() -> None:
    table = slot_table(SCENARIO, [*measured(28), *measured(28, block=1), *measured(28, arm="b")])

    assert not [key for key in table if key[0] == "ttft_p90"]


def test_failed_requests_count_for_nothing() -> None:
    items = measured(30)
    items[3].sample.error = items[4].sample.error = "HTTP 500"

    assert ("ttft_p90", 0, "base") not in slot_table(SCENARIO, items)


def test_points_have_values_of_their_own() -> None:
    pointed = replace(SCENARIO, judged=("ttft@c1", "ttft@c8"), shown=("ttft_p90@c8",))
    table = slot_table(pointed, [*measured(1, point="c1"), *measured(30, point="c8")])

    assert table["ttft@c1", 0, "base"] == pytest.approx(0.010)
    assert table["ttft@c8", 0, "base"] == pytest.approx(0.0245)
    assert table["ttft_p90@c8", 0, "base"] == pytest.approx(np.quantile(np.arange(10, 40), 0.9) / 1e3)
    assert medians(pointed, ["base"], table, [0])["ttft@c8"]["base"] == table["ttft@c8", 0, "base"]


def test_a_metric_that_successful_requests_do_not_show_is_told_not_only_its_block_lost() -> None:
    scenario, slots = find_scenario("decode"), order(["base", "null"], 2, 1)
    short = replace(request(10.0), chunk_t_ns=[MS], chunk_ntok=[1], n_out=1)
    failed = replace(request(10.0), error="HTTP 500")
    items = [*measured(1), *measured(1, arm="null"), Measured(1, "base", short), Measured(1, "null", failed)]
    table = slot_table(scenario, items)

    assert missing_blocks(scenario, slots, table) == {1}
    assert missing_notes(scenario, slots, items, table) == ["decode: 1 slots of base show no such value"]
    assert missing_notes(SCENARIO, slots, items, slot_table(SCENARIO, items)) == []
