"""Scenarios are data: all arms of a block are asked for the same work, and the texts are new in every slot."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench.scenarios import find_scenario, known
from pocketllm.bench.scenarios.contract import Arrivals, Need, Planned, Point, Scenario
from pocketllm.bench.scenarios.prompts import ask_of
from pocketllm.errors import OptionError


def words(text: str) -> list[int]:
    return [sum(map(ord, word)) % 50_000 for word in text.split()]


def joined(ids: object) -> str:
    return str(ids)


@st.composite
def points(draw: st.DrawFn) -> Point:
    arrivals = draw(st.sampled_from(Arrivals))
    return Point(
        label=draw(st.sampled_from(["", "8k"])),
        n_prompt=draw(st.integers(20, 200)),
        n_out=draw(st.integers(1, 50)),
        spread=draw(st.floats(0, 0.9)),
        arrivals=arrivals,
        concurrency=draw(st.integers(1, 8)),
        rate_per_s=2.0 if arrivals is Arrivals.POISSON else None,
        num_requests=draw(st.integers(1, 20)),
    )


@pytest.mark.parametrize("name", known())
def test_every_scenario_is_called_like_its_file_and_tells_what_it_does(name: str) -> None:
    scenario = find_scenario(name)

    assert scenario.name == name
    assert scenario.about
    assert scenario.primary
    labels = [point.label for point in scenario.points]
    assert len(set(labels)) == len(labels)
    assert all(labels) or len(labels) == 1
    assert not set(scenario.primary) & set(scenario.also)


@given(points())
def test_arms_of_a_block_do_the_same_work_with_other_words(point: Point) -> None:
    one, other = point.requests("slot-1", "block-1"), point.requests("slot-2", "block-1")

    def work(planned: Planned) -> tuple[int, int, float | None]:
        return planned.n_prompt, planned.n_out, planned.offset_s

    assert [work(planned) for planned in one] == [work(planned) for planned in other]
    assert one == point.requests("slot-1", "block-1")
    assert not {planned.salt for planned in one} & {planned.salt for planned in other}
    assert len({planned.salt for planned in one}) == len(one)


@given(points())
def test_lengths_stay_within_their_spread(point: Point) -> None:
    for planned in point.requests("s", "b"):
        for drawn, asked in ((planned.n_prompt, point.n_prompt), (planned.n_out, point.n_out)):
            assert asked is not None
            assert max(1, round(asked * (1 - point.spread))) <= drawn <= round(asked * (1 + point.spread))
        assert planned.n_prompt + planned.n_out <= point.longest


@given(points())
def test_arrival_times_begin_at_once_and_never_go_back(point: Point) -> None:
    offsets = [planned.offset_s for planned in point.requests("s", "b")]

    match point.arrivals:
        case Arrivals.CLOSED:
            assert set(offsets) == {None}
        case Arrivals.WAVE:
            assert set(offsets) == {0.0}
        case Arrivals.POISSON:
            assert offsets[0] == 0.0
            assert offsets == sorted(offset for offset in offsets if offset is not None)


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    point = Point(n_prompt=8, n_out=1, arrivals=Arrivals.POISSON, rate_per_s=4.0, num_requests=4001)
    offsets = [planned.offset_s or 0.0 for planned in point.requests("s", "b")]
    gaps = [after - before for before, after in pairwise(offsets)]

    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.25, rel=0.1)


def test_a_burn_in_is_twice_as_wide_as_the_load_and_shorter() -> None:
    point = Point(n_prompt=100, n_out=40, concurrency=4, num_requests=8)

    assert [(one.n_prompt, one.n_out) for one in point.burnin("s", 0.25)] == [(25, 10)] * 8
    assert len(replace(point, concurrency=1).burnin("s")) == 1


def test_a_warm_prefix_is_read_in_the_burn_in_and_shared_by_all_requests_of_a_slot() -> None:
    cold, hit = find_scenario("prefix").shapes

    def first(planned: Planned) -> tuple[int, ...]:
        return ask_of(planned, words, joined).prompt_token_ids[: planned.n_prefix]

    shared = {first(planned) for planned in (*hit.burnin("slot-1"), *hit.requests("slot-1", "b", 3))}
    assert len(shared) == 1
    assert first(hit.requests("slot-2", "b")[0]) not in shared
    assert len({first(planned) for planned in cold.requests("slot-1", "b", 3)}) == 3
    assert cold.burnin("slot-1")[0].n_prefix == 0
    assert [len(ask_of(one, words, joined).prompt_token_ids) for one in hit.requests("s", "b", 2)] == [1088, 1088]
    assert len({ask_of(one, words, joined).prompt_token_ids for one in hit.requests("s", "b", 3)}) == 3


def test_points_that_do_not_fit_are_left_out_by_name() -> None:
    kept, left_out = find_scenario("context").within(8192)

    assert [point.label for point in kept.points] == ["0", "4k"]
    assert left_out == ("16k", "32k")
    assert kept.primary == ("decode@0", "decode@4k")


def test_a_context_that_holds_no_point_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(OptionError, match=r"prefill needs 513 tokens of context.*max_model_len is 256"):
        find_scenario("prefill").within(256)


def test_points_are_chosen_by_label() -> None:
    scenario = find_scenario("concurrency").at(["1", "8"])

    assert scenario.primary == ("throughput@1", "throughput@8")
    with pytest.raises(OptionError, match="no point '64'; points of concurrency: 1, 2, 4, 8, 16, 32"):
        find_scenario("concurrency").at(["64"])
    with pytest.raises(OptionError, match="decode has a single point"):
        find_scenario("decode").at(["1"])


def test_a_length_given_by_hand_makes_one_point_where_points_differ_in_it() -> None:
    assert find_scenario("prefill").resized(256, None).primary == ("prefill",)
    assert find_scenario("prefill").resized(256, None).shapes[0].n_prompt == 256
    assert len(find_scenario("concurrency").resized(100, 8).points) == 6
    assert [shape.n_prefix for shape in find_scenario("prefix").resized(544, None).shapes] == [512, 512]
    assert {(shape.n_prompt, shape.n_out) for shape in find_scenario("concurrency").resized(100, 8).shapes} == {
        (100, 8)
    }


def test_a_target_without_what_a_scenario_needs_is_refused_in_a_sentence() -> None:
    scenario = find_scenario("structured")

    assert scenario.refusal("ours", frozenset()) == (
        "scenario structured needs structured output (a JSON schema), which arm ours does not have"
    )
    assert scenario.refusal("ours", frozenset({Need.STRUCTURED})) is None
    assert find_scenario("decode").refusal("ours", frozenset()) is None


def test_a_point_that_is_not_judged_is_shown() -> None:
    scenario = Scenario("x", "x", 1, 1, judged=("op",), points=(Point("a"), Point("b", judged=False)))

    assert (scenario.primary, scenario.also) == (("op@a",), ("op@b",))
