"""The latency words, against numpy, against each other, and against what a person reads off a timeline."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench import latency
from pocketllm.bench.latency import Timing
from tests.asks import peak_in_flight

SECOND = 1_000_000_000


def timing(
    chunks: Sequence[float], counts: Sequence[int] | None = None, sent: float = 0.0, n_prompt: int = 10
) -> Timing:
    """A request sent at `sent` whose chunks came at these seconds."""
    stamps = [round(at * SECOND) for at in chunks]
    counts = [1] * len(stamps) if counts is None else list(counts)
    begin = round(sent * SECOND)
    first = stamps[0] if stamps else None
    return Timing(begin, begin, begin, first, stamps, list(counts), n_prompt, sum(counts), None)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    sent = draw(st.floats(0, 5))
    gaps = draw(st.lists(st.floats(0.001, 1), min_size=1, max_size=8))
    counts = draw(st.lists(st.integers(1, 4), min_size=len(gaps), max_size=len(gaps)))
    return timing(list(sent + np.cumsum(gaps)), counts, sent)


def test_the_words_of_one_request_are_read_off_its_timeline() -> None:
    request = timing([0.5, 0.7, 0.8, 1.0])

    assert latency.ttft_s(request) == 0.5
    assert latency.e2el_s(request) == 1.0
    assert latency.tpot_s(request) == pytest.approx(0.5 / 3)
    assert latency.gaps_s(request) == pytest.approx([0.2, 0.1, 0.2])
    assert latency.first_decode_s(request) == pytest.approx(0.2)
    assert latency.decode_s(request) == pytest.approx(0.15)
    assert latency.prefill_s(request) == pytest.approx(0.05)


def test_a_first_chunk_without_content_has_a_ttft_of_its_own() -> None:
    request = replace(timing([0.5, 0.6]), t_first_ns=round(0.2 * SECOND))

    assert (latency.ttft_any_s(request), latency.ttft_s(request)) == (0.2, 0.5)


def test_three_tokens_a_chunk_do_not_make_decode_three_times_as_slow() -> None:
    one = timing([0.1 * (index + 1) for index in range(13)])
    three = timing([0.1, 0.4, 0.7, 1.0, 1.3], [1, 3, 3, 3, 3])

    assert latency.decode_s(three) == pytest.approx(latency.decode_s(one))
    assert latency.tpot_s(three) == pytest.approx(latency.tpot_s(one))
    assert latency.is_token_by_token([one])
    assert not latency.is_token_by_token([one, three])


def test_one_token_has_no_tpot_and_none_has_no_latency() -> None:
    assert latency.tpot_s(timing([0.5])) is None
    assert latency.slot_values([timing([0.5])]).keys().isdisjoint({"tpot", "decode", "itl", "first_decode"})
    assert latency.slot_values([timing([])]) == {}


@given(timings())
def test_tpot_and_ttft_add_up_to_the_whole(request: Timing) -> None:
    tpot, ttft, e2el = latency.tpot_s(request), latency.ttft_s(request), latency.e2el_s(request)

    assert e2el is not None
    assert ttft is not None
    assert ttft + (tpot or 0.0) * (request.n_out - 1) == pytest.approx(e2el)
    assert sum(latency.gaps_s(request)) == pytest.approx(e2el - ttft, abs=1e-6)


@given(st.lists(timings(), min_size=1, max_size=6))
def test_requests_in_flight_lie_between_one_and_all(requests: list[Timing]) -> None:
    mean, most = latency.achieved_concurrency(requests), peak_in_flight(requests)

    assert mean is not None
    assert 0 < mean <= most + 1e-9
    assert 1 <= most <= len(requests)


def test_two_requests_one_after_another_are_never_two_in_flight() -> None:
    assert peak_in_flight([timing([0.5, 1.0]), timing([1.5, 2.0], sent=1.0)]) == 1
    assert peak_in_flight([timing([0.5, 1.0]), timing([1.5, 2.0], sent=0.9)]) == 2


def test_throughput_counts_the_tokens_of_all_over_one_window() -> None:
    values = latency.slot_values([timing([0.5, 1.0]), timing([0.6, 2.0], [1, 3])])

    assert 1 / values["throughput"] == pytest.approx(6 / 2.0)
    assert 1 / values["request_throughput"] == pytest.approx(1.0)


def test_goodput_counts_only_what_met_every_limit() -> None:
    quick, slow = timing([0.1, 0.2, 0.3]), timing([0.9, 1.4, 2.0])
    slos = {"ttft": 0.5, "tpot": 0.2}

    assert [latency.is_good(request, slos) for request in (quick, slow)] == [True, False]
    assert 1 / latency.slot_values([quick, slow], slos)["goodput"] == pytest.approx(0.5)
    assert not latency.is_good(replace(quick, error="HTTP 500"), slos)
    assert "goodput" not in latency.slot_values([slow], slos)


def test_a_failed_request_has_no_part_in_a_slot_s_value() -> None:
    good = timing([0.1, 0.2, 0.3])

    assert latency.slot_values([good, replace(timing([9.0, 9.5]), error="gone")]) == latency.slot_values([good])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=400), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_is_numpy_s_or_refused(values: list[float], quantile: float) -> None:
    found = latency.quantile_of(values, quantile)

    assert found is not None
    assert found.maximum == max(values)
    enough = quantile == 0.5 or len(values) >= {0.9: 29, 0.95: 59, 0.99: 299}[quantile]
    assert (found.value is not None) == enough
    if found.value is not None:
        assert found.value == pytest.approx(float(np.quantile(values, quantile)))


def test_a_quantile_of_too_few_requests_says_how_many_it_needs() -> None:
    found = latency.quantile_of([1.0] * 80, 0.99)

    assert found is not None
    assert found.refusal == "n/a (80 < 299)"


def test_a_row_without_chunk_lists_keeps_its_first_and_last_stamp() -> None:
    row = {
        "t_sched_ns": None,
        "t_send_ns": 1 * SECOND,
        "t_first_ns": 2 * SECOND,
        "t_first_content_ns": 2 * SECOND,
        "t_last_ns": 4 * SECOND,
        "chunk_t_ns": None,
        "chunk_ntok": None,
        "srv_queue_s": None,
        "n_prompt": 4,
        "n_out": 5,
        "error": None,
    }
    request = Timing.of_row(row)

    assert (latency.ttft_s(request), latency.e2el_s(request), latency.tpot_s(request)) == (1.0, 3.0, 0.5)
    assert latency.decode_s(request) == 0.5
    assert latency.gaps_s(request) == []
    assert latency.decode_s(Timing.of_row({**row, "srv_queue_s": 0.25, "chunk_ntok": []})) == 0.5


@pytest.mark.parametrize("name", sorted(latency.METRICS))
def test_every_metric_can_be_shown_with_its_unit(name: str) -> None:
    metric = latency.metric_of(f"{name}@8k")

    assert metric is latency.METRICS[name]
    assert metric.show(0.5) > 0
    assert metric.shown


def test_what_was_not_kept_of_a_request_is_no_second_token_and_no_gap() -> None:
    ends = replace(timing([0.5, 1.5]), chunk_ntok=[], n_out=11)
    one = replace(timing([0.5, 0.5]), chunk_ntok=[], n_out=1)

    for request in (ends, one):
        assert latency.first_decode_s(request) is None
        assert latency.gaps_s(request) == []
    assert latency.decode_s(ends) == pytest.approx(0.1)
    assert latency.first_decode_s(replace(ends, n_out=2)) == pytest.approx(1.0)
