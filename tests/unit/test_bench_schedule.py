from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench import schedule
from pocketllm.bench.schedule import (
    MIN_BLOCKS,
    Costs,
    default_blocks,
    order,
    row_set_size,
    whole_row_sets,
)

ARMS = ["base", "b", "c", "d", "e", "f", "g"]


def balance(slots: list[schedule.Slot]) -> tuple[set[int], set[int]]:
    """Distinct counts of (arm, position), and of ordered neighbors inside blocks; one number each when balanced."""
    places = Counter((slot.arm, slot.position) for slot in slots)
    neighbors = Counter((slot.prev_arm, slot.arm) for slot in slots if slot.position)
    return set(places.values()), set(neighbors.values())


@given(k=st.integers(2, 6), sets=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_each_arm_stands_in_each_position_and_follows_each_other_equally_often(k: int, sets: int, seed: int) -> None:
    blocks = sets * row_set_size(k)

    slots = order(ARMS[:k], blocks, seed)

    places, neighbors = balance(slots)
    assert places == {blocks // k}
    assert neighbors == {blocks // k}
    assert len({(slot.prev_arm, slot.arm) for slot in slots if slot.position}) == k * (k - 1)


def test_the_balance_check_itself_sees_a_fixed_order() -> None:
    fixed = [schedule.Slot(i, 0, i // 2, i % 2, ARMS[i % 2], ARMS[(i - 1) % 2]) for i in range(8)]

    assert len({(s.prev_arm, s.arm) for s in fixed if s.position}) == 1
    assert {Counter((s.arm, s.position) for s in fixed)[place] for place in (("base", 0), ("base", 1))} == {0, 4}


@given(k=st.integers(2, 7), seed=st.integers(0, 2**32))
def test_every_arm_runs_once_a_block_and_slots_know_their_predecessor(k: int, seed: int) -> None:
    slots = order(ARMS[:k], row_set_size(k), seed)

    for block in range(row_set_size(k)):
        assert sorted(slot.arm for slot in slots if slot.block == block) == sorted(ARMS[:k])
    assert [slot.prev_arm for slot in slots] == [None, *(slot.arm for slot in slots[:-1])]
    assert [slot.index for slot in slots] == list(range(len(slots)))


def test_two_arms_run_as_abba_with_one_seeded_flip() -> None:
    sequences = {"".join(slot.arm for slot in order(["A", "B"], 4, seed)) for seed in range(20)}

    assert sequences == {"ABBAABBA", "BAABBAAB"}


def test_the_seed_decides_the_order_and_nothing_else_does() -> None:
    assert order(ARMS[:4], 12, 5) == order(ARMS[:4], 12, 5)
    assert order(ARMS[:4], 12, 5) != order(ARMS[:4], 12, 6)


def test_blocks_are_whole_row_sets_and_never_fewer_than_the_minimum() -> None:
    assert {k: default_blocks(k) for k in range(2, 7)} == {2: 12, 3: 12, 4: 12, 5: 10, 6: 12}
    assert {k: whole_row_sets(MIN_BLOCKS, k) for k in range(2, 7)} == {2: 8, 3: 12, 4: 8, 5: 10, 6: 12}


@given(
    request_s=st.lists(st.floats(0.01, 20), min_size=2, max_size=6),
    seconds=st.floats(1, 2000),
    burnin=st.sampled_from([0.25, 1.0]),
    requests=st.none() | st.integers(1, 5),
    fixed_s=st.sampled_from([0.0, 3.0]),
    starts=st.integers(1, 5),
)
def test_a_fitted_run_stays_within_its_budget_or_is_refused(
    request_s: list[float], seconds: float, burnin: float, requests: int | None, fixed_s: float, starts: int
) -> None:
    costs = Costs(tuple(request_s), fixed_s, start_s=2.0)
    fitted = costs.fit(seconds, burnin, requests, starts)

    if fitted is None:
        assert costs.minimum_s(requests, starts) > seconds * (1 - 1e-9)
    else:
        assert fitted.blocks >= MIN_BLOCKS
        assert fitted.blocks % (row_set_size(len(request_s)) * starts) == 0
        assert requests in (None, fitted.requests)
        assert fitted.seconds <= seconds * (1 + 1e-9)
        assert fitted.starts == starts
        assert fitted.seconds >= fitted.blocks * fixed_s + (starts - 1) * 2.0


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("starts", [2, 5])
def test_every_start_is_balanced_by_itself_and_nothing_precedes_its_first_slot(k: int, starts: int) -> None:
    blocks = whole_row_sets(MIN_BLOCKS, k, starts)
    slots = order(ARMS[:k], blocks, 3, starts)

    assert [slot.start for slot in slots] == sorted(slot.start for slot in slots)
    for start in range(starts):
        own = [slot for slot in slots if slot.start == start]
        assert len(own) == len(slots) // starts
        assert len(set(Counter((slot.arm, slot.position) for slot in own).values())) == 1
        assert [slot.index for slot in own if slot.prev_arm is None] == [own[0].index]


def test_a_tight_budget_gives_up_requests_before_blocks() -> None:
    fitted = Costs((0.5, 0.5, 0.5)).fit(40.0)

    assert fitted is not None
    assert (fitted.blocks, fitted.requests) == (12, 1)
