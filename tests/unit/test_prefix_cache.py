"""What is found again, what is never shared, and that an answer does not tell the difference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm import LLM, SamplingParams
from pocketllm.engine.lifecycle.kv.block_pool import BlockPool
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.options import EngineOptions
from tests.fake_model import FakeModel, fake_loop, greedy_reference, limits
from tests.native import needs_native

BLOCK = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def answer(loop: EngineLoop, prompt: list[int], name: str = "r", salt: str | None = None, **params: Any) -> FinishEvent:
    """The end of a request that runs alone; its tokens must be the model's."""
    events: list[Any] = []
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **params}
    loop.submit(Request(name, prompt, SamplingParams(**params), cache_salt=salt), events.append)
    while loop.step():
        pass
    if params["temperature"] == 0.0:
        ids = [event.token_id for event in events if isinstance(event, TokenEvent)]
        expected = greedy_reference(prompt, len(ids))
        assert ids[: len(expected)] == expected
    end = events[-1]
    assert isinstance(end, FinishEvent)
    return end


def num_computed(loop: EngineLoop) -> int:
    return loop.stats().num_step_tokens


# -- a hit
def test_the_second_of_two_equal_prompts_computes_only_its_last_block() -> None:
    loop, _, _ = fake_loop()
    first = answer(loop, PROMPT)
    before = num_computed(loop)
    second = answer(loop, PROMPT)

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert num_computed(loop) - before == len(PROMPT) - 16 + 5


def test_at_least_the_last_token_of_a_prompt_is_computed() -> None:
    loop, _, model = fake_loop()
    answer(loop, PROMPT[:16])
    again = answer(loop, PROMPT[:16])

    assert again.num_cached_tokens == 12
    assert model.batches[-6].num_tokens == 4


def test_a_conversation_goes_on_where_the_answer_ended() -> None:
    loop, _, _ = fake_loop()
    answer(loop, PROMPT)
    turn = PROMPT + greedy_reference(PROMPT, 6) + [11, 12]

    # the answer's last token was drawn and not computed: 23 tokens are in the cache, 5 full blocks of them
    assert answer(loop, turn).num_cached_tokens == 20


def test_an_answer_that_has_other_bits_than_in_a_prompt_is_computed_again() -> None:
    loop, _, _ = fake_loop(answers_apart=True)
    answer(loop, PROMPT)
    turn = PROMPT + greedy_reference(PROMPT, 6) + [11, 12]

    assert answer(loop, turn).num_cached_tokens == 16
    assert answer(loop, turn).num_cached_tokens == 24


def test_nobody_waits_for_an_answer_that_will_not_be_found() -> None:
    loop, scheduler, _ = fake_loop(answers_apart=True)
    loop.submit(
        Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)), lambda event: None
    )
    for _ in range(12):
        loop.step()
    [running] = scheduler.running
    turn = PROMPT + running.output_token_ids[:8]
    loop.submit(Request("b", turn, SamplingParams(temperature=0.0, max_tokens=2)), lambda event: None)
    loop.step()

    assert [request.request_id for request in scheduler.running] == ["a", "b"]


def test_a_prompt_that_differs_early_shares_nothing_though_its_end_is_equal() -> None:
    loop, _, _ = fake_loop()
    answer(loop, PROMPT)

    assert answer(loop, [90, *PROMPT[1:]]).num_cached_tokens == 0
    assert answer(loop, [*PROMPT[:5], 90, *PROMPT[6:]]).num_cached_tokens == 4


def test_requests_that_run_at_once_share_the_blocks_of_one_that_runs_already() -> None:
    loop, scheduler, _ = fake_loop()
    for name in "ab":
        loop.submit(Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=9)), lambda event: None)
        for _ in range(4):
            loop.step()
    old, young = scheduler.running

    assert old.block_ids[:4] == young.block_ids[:4]
    assert not set(old.block_ids[4:]) & set(young.block_ids[4:])
    assert scheduler.pool.num_used == len({*old.block_ids, *young.block_ids})


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    loop, _, model = fake_loop(max_num_batched_tokens=64)
    ends: list[Any] = []
    for name in "abcd":
        loop.submit(Request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=2)), ends.append)
    while loop.step():
        pass

    assert [batch.num_seqs for batch in model.batches] == [1, 1, 4, 4]
    assert [event.num_cached_tokens for event in ends if isinstance(event, FinishEvent)] == [0, 16, 16, 16]
    for name in "abcd":
        ids = [event.token_id for event in ends if isinstance(event, TokenEvent) and event.request_id == name]
        assert ids == greedy_reference(PROMPT, 2)


def test_a_prompt_that_is_scored_waits_for_nobody() -> None:
    loop, _, model = fake_loop(max_num_batched_tokens=64)
    loop.submit(Request("answered", PROMPT, SamplingParams(temperature=0.0, max_tokens=2)), lambda event: None)
    loop.submit(Request("scored", PROMPT, SamplingParams(), wants_prompt_logits=True), lambda event: None)
    loop.step()

    assert model.batches[0].num_seqs == 2


def test_a_short_common_beginning_is_not_worth_waiting_for() -> None:
    loop, _, model = fake_loop(max_num_batched_tokens=64, prefill_chunk=32)
    for name in "ab":
        prompt = PROMPT[:5] + [ord(name) - 64] * 14
        loop.submit(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=2)), lambda event: None)
    loop.step()

    assert model.batches[0].num_seqs == 2


def test_a_salt_keeps_prompts_apart() -> None:
    loop, _, _ = fake_loop()
    answer(loop, PROMPT, salt="mine")

    assert answer(loop, PROMPT).num_cached_tokens == 0
    assert answer(loop, PROMPT, salt="yours").num_cached_tokens == 0
    assert answer(loop, PROMPT, salt="mine").num_cached_tokens == 16


def test_schedulers_with_different_seeds_have_different_keys() -> None:
    def keys(**changes: Any) -> list[bytes]:
        request = Request("r", PROMPT, SamplingParams())
        seed = changes.pop("seed", b"model")
        cache = Scheduler(limits(**changes), 97, seed).prefix_cache
        assert cache is not None
        cache.match(request)
        cache._key(request, 1)
        return request.block_keys

    assert keys() == keys()
    assert keys()[0] != keys(seed=b"other")[0]
    assert len({*keys(), *keys(seed=b"other"), *keys(block_size=8)}) == 6


def test_a_scored_prompt_is_computed_whole() -> None:
    loop, _, _ = fake_loop()
    answer(loop, PROMPT)
    events: list[Any] = []
    loop.submit(Request("scored", PROMPT, SamplingParams(), wants_prompt_logits=True), events.append)
    while loop.step():
        pass

    assert events[-1].num_cached_tokens == 0
    assert np.isfinite(events[-1].prompt_logits).all()


# -- room
def test_idle_blocks_are_free_and_the_longest_idle_goes_first() -> None:
    loop, scheduler, _ = fake_loop(num_blocks=12)
    one, two, three = [[number] * 17 for number in (1, 2, 3)]
    answer(loop, one)
    answer(loop, two)
    answer(loop, one)

    assert scheduler.pool.num_used == 0
    answer(loop, three)

    assert answer(loop, one).num_cached_tokens == 16
    assert answer(loop, two).num_cached_tokens < 16, "something had to go"
    assert loop.stats().kv_usage == 0.0


def test_of_an_evicted_prompt_the_first_blocks_stay_longest() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.set_key(block, bytes([block]))
    pool.free(blocks)
    pool.allocate(2)

    assert [pool.find(bytes([block])) for block in blocks] == [*blocks[:2], None, None]


def test_a_preempted_request_takes_up_what_is_still_there() -> None:
    loop, scheduler, _ = fake_loop(num_blocks=8, reserve=0.0)
    events: dict[str, list[Any]] = {"old": [], "young": []}
    for name, token in (("old", 1), ("young", 2)):
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        loop.submit(Request(name, [token] * 9, params), events[name].append)
    while loop.step():
        pass

    assert scheduler.num_preemptions > 0
    for name, token in (("old", 1), ("young", 2)):
        ids = [event.token_id for event in events[name][:-1]]
        assert ids == greedy_reference([token] * 9, 14)[: len(ids)]
        assert events[name][-1].num_cached_tokens == 0, "its own blocks are no hit"
    assert loop.stats().num_prefix_hit_tokens


# -- what is not found
def test_a_reset_forgets_everything_that_was_computed_before() -> None:
    loop, scheduler, _ = fake_loop()
    answer(loop, PROMPT)

    assert loop.reset_prefix_cache()
    assert scheduler.pool.num_keyed == 0
    assert answer(loop, PROMPT).num_cached_tokens == 0
    assert answer(loop, PROMPT).num_cached_tokens == 16


def test_what_a_request_computes_on_top_of_blocks_from_before_a_reset_is_not_found_either() -> None:
    loop, _, _ = fake_loop()
    loop.submit(Request("runs", PROMPT, SamplingParams(temperature=0.0, max_tokens=2)), lambda event: None)
    loop.step()
    loop.reset_prefix_cache()
    while loop.step():
        pass
    answer(loop, [*PROMPT[:8], 60])

    assert answer(loop, PROMPT).num_cached_tokens == 8


def test_without_a_prefix_cache_nothing_is_found_and_no_reset_happens() -> None:
    loop, _, _ = fake_loop(prefix_cache=False)
    answer(loop, PROMPT)

    assert answer(loop, PROMPT).num_cached_tokens == 0
    assert not loop.reset_prefix_cache()
    assert loop.stats().num_prefix_queried_tokens is None


def test_what_a_request_left_that_ended_in_an_error_is_not_found() -> None:
    class PoisonedOnce(FakeModel):
        def logits(self, hidden: Any) -> Any:
            return np.full_like(hidden, np.nan) if self.num_calls == 3 else hidden

    loop, _, _ = fake_loop(PoisonedOnce(64, BLOCK))

    assert answer(loop, PROMPT).reason is FinishReason.ERROR
    assert answer(loop, PROMPT).num_cached_tokens == 0


def test_queries_and_hits_are_counted_in_tokens() -> None:
    loop, _, _ = fake_loop()
    answer(loop, PROMPT)
    answer(loop, PROMPT)
    stats = loop.stats()

    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (36, 16)


# -- whatever happens
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 25), st.integers(1, 8)),
        st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 3), st.just(0), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(9, 24), st.sampled_from([0.0, 1.0]), st.sampled_from([3, 8]), st.sets(st.integers(1, 20)))
def test_blocks_are_never_lost_nor_written_while_shared_and_answers_are_right(
    actions: list[tuple[str, int, int, int]], num_blocks: int, reserve: float, chunk: int, fail_at: set[int]
) -> None:
    loop, scheduler, model = fake_loop(num_blocks=num_blocks, reserve=reserve, prefill_chunk=chunk)
    model.fail_at = fail_at
    asked: list[tuple[list[int], int, list[Any]]] = []

    def step() -> bool:
        is_more = loop.step()
        check_pool(scheduler)
        return is_more

    for action, number, length, max_tokens in actions:
        if action == "submit":
            # few beginnings, so that most prompts share some blocks
            prompt = ([number % 2] * 9 + [number] * 20)[:length]
            asked.append((prompt, max_tokens, []))
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            loop.submit(Request(str(len(asked)), prompt, params), asked[-1][2].append)
        elif action == "cancel":
            loop.cancel(str(number))
        elif action == "reset":
            loop.reset_prefix_cache()
        else:
            for _ in range(number):
                step()
    while step():
        pass

    assert scheduler.pool.num_used == 0
    for prompt, max_tokens, events in asked:
        ids = [event.token_id for event in events[:-1]]
        expected = greedy_reference(prompt, max_tokens)
        is_whole = events[-1].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert ids == (expected if is_whole else expected[: len(ids)])


def check_pool(scheduler: Scheduler) -> None:
    """Every block is empty, idle or used, and its uses are those of the running requests."""
    pool = scheduler.pool
    held = [block for request in scheduler.running for block in request.block_ids]
    assert [held.count(block) for block in range(pool.num_blocks)] == pool._ref_counts
    places = [*pool._empty, *pool._idle, *set(held)]
    assert sorted(places) == list(range(pool.num_blocks))
    assert set(pool._idle) <= set(pool._key_of)
    assert not set(pool._empty) & set(pool._key_of)
    assert {block: key for key, block in pool._block_of.items()} == pool._key_of
    for request in scheduler.running:
        unfinished = request.block_ids[request.num_computed_tokens // BLOCK :]
        assert all(held.count(block) == 1 for block in unfinished), "a block that is written is shared"
        assert not set(unfinished) & set(pool._key_of), "a block that is written can be found"


# -- a real model
@pytest.fixture(scope="module", params=["reference", pytest.param("cpu", marks=needs_native)])
def engine(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[Engine]:
    with load_engine(EngineOptions(str(tiny_gguf), request.param, prefill_chunk=16, block_size=8, threads=1)) as engine:
        yield engine


def run_and_record(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], int, list[npt.NDArray[np.float32]]]:
    """Token ids, cached tokens, and each step's logits as the model gave them."""
    rows: list[npt.NDArray[np.float32]] = []
    logits = type(engine.model).logits

    def recorded(model: Any, hidden: Any) -> Any:
        found = logits(model, hidden)
        rows.extend(np.array(found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "logits", recorded)
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        [result] = LLM.from_engine(engine).generate([prompt], params)
    return result.token_ids, result.usage.cached_tokens, rows


def test_warm_answers_have_the_token_ids_and_the_very_logits_of_cold_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [int(token) for token in np.random.default_rng(5).integers(3, 500, 61)]
    engine.loop.reset_prefix_cache()
    cold_ids, none, cold = run_and_record(engine, prompt, monkeypatch)
    warm_ids, some, warm = run_and_record(engine, prompt, monkeypatch)

    assert (none, some) == (0, 56)
    assert warm_ids == cold_ids
    np.testing.assert_array_equal(np.array(warm), np.array(cold))


def test_a_sibling_may_do_without(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sibling = engine.sibling(prefix_cache=False)
    try:
        assert [run_and_record(sibling, [7] * 30, monkeypatch)[1] for _ in range(2)] == [0, 0]
        assert sibling.plan.limits.prefix_cache is False
        assert sibling.plan.as_dict()["options"]["prefix_cache"] is False
    finally:
        sibling.close()
