import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.kv.block_pool import BlockPool, blocks_for


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(count, 4) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(8)

    assert sorted(pool.allocate(5) + pool.allocate(3)) == list(range(8))
    assert pool.num_free == 0


def test_a_block_freed_twice_is_a_bug_that_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks[:1])


def test_more_blocks_than_are_free_is_a_bug_that_is_caught() -> None:
    pool = BlockPool(4)
    pool.allocate(3)

    with pytest.raises(AssertionError):
        pool.allocate(2)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_free_and_owned_blocks_always_add_up(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks)
    owned: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation and number <= pool.num_free:
            owned.append(pool.allocate(number))
        elif not is_allocation and owned:
            pool.free(owned.pop(number % len(owned)))
        held = [block for blocks in owned for block in blocks]

        assert len(set(held)) == len(held)
        assert pool.num_used == len(held)
        assert pool.num_free + pool.num_used == num_blocks
