"""Blocks of layers that see a window: few however long a request is, never seen by two, found again by the cache."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import FinishReason, Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.models.blocks import Windows
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.plan.memory import Demand, Window, plan_memory
from pocketllm.engine.plan.sizes import SizedOptions
from tests.fake_model import FakeModel, fake_loop, greedy_reference, limits, next_state
from tests.native import cpu_ops, needs_native
from tests.unit.test_prefix_cache import answer, num_computed

BLOCK = 4
PROMPT = [*range(40), *range(40)]


@dataclass
class WindowModel(FakeModel):
    """A fake model that also keeps, of each token, what its sequence was boiled down to, for a window's time."""

    window: int = 0
    num_window_blocks: int = 0
    slips: list[str] = field(default_factory=list)
    """What a window showed that was not its sequence's own."""

    def __post_init__(self) -> None:
        self.kept = np.full(self.num_window_blocks * self.block_size, -1, np.int64)

    def forward(self, batch: ForwardBatch, cache: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        result = super().forward(batch, cache)
        assert len(set(batch.window_slots.tolist())) == batch.num_tokens
        known = [self._states(batch, cache, row) for row in range(batch.num_seqs)]
        seqs = np.repeat(np.arange(batch.num_seqs), np.diff(batch.query_start_loc))
        for slot, seq, position in zip(batch.window_slots, seqs, batch.positions, strict=True):
            self.kept[slot] = known[seq][position]
        for seq, position in zip(seqs, batch.positions, strict=True):
            places = np.arange(max(int(position) - self.window + 1, 0), int(position) + 1)
            blocks = batch.window_table[seq, places // self.block_size]
            seen = self.kept[blocks * self.block_size + places % self.block_size]
            if seen.tolist() != [known[seq][place] for place in places]:
                self.slips.append(f"step {self.num_calls}, sequence {seq}, position {position}")
        return result

    def _states(self, batch: ForwardBatch, cache: npt.NDArray[np.int64], seq: int) -> list[int]:
        places = np.arange(batch.seq_lens[seq])
        tokens = cache[batch.block_table[seq, places // self.block_size] * self.block_size + places % self.block_size]
        states = [1]
        for token in tokens.tolist():
            states.append(next_state(states[-1], token))
        return states[1:]


def window_loop(window: int = 6, **changes: Any) -> tuple[EngineLoop, Scheduler, WindowModel]:
    """A loop over such a model; a request has as many of a window's blocks as the plan says."""
    some = limits(window=window, **{"max_model_len": 128, "num_window_blocks": 24, **changes})
    options = SizedOptions(
        prefill_chunk=some.prefill_chunk, max_num_batched_tokens=some.max_num_batched_tokens, block_size=BLOCK
    )
    most = Window(window, 1, some.max_steps_in_flight).num_blocks(options, some.max_model_len)
    model = WindowModel(some.num_blocks, BLOCK, window=window, num_window_blocks=some.num_window_blocks)
    sizes = {"max_model_len": 128, "num_window_blocks": some.num_window_blocks, **changes}
    loop, scheduler, _ = fake_loop(model, window=window, window_blocks_per_request=most, **sizes)
    return loop, scheduler, model


def check_windows(scheduler: Scheduler) -> None:
    """Each block's uses are those of the running requests; what is written has one user and no key; all are few."""
    assert scheduler.windows is not None
    pool = scheduler.windows.pool
    held = [block for request in scheduler.running for block in request.window_block_ids]
    assert [held.count(block) for block in range(pool.num_blocks)] == pool._ref_counts
    assert sorted([*pool._empty, *pool._idle, *set(held)]) == list(range(pool.num_blocks))
    for request in scheduler.running:
        assert len(request.window_block_ids) <= scheduler.limits.window_blocks_per_request
        assert request.num_gone_blocks + len(request.window_block_ids) == len(request.block_ids)
        unfinished = request.window_block_ids[request.num_computed_tokens // BLOCK - request.num_gone_blocks :]
        assert all(held.count(block) == 1 for block in unfinished), "a block that is written is shared"
        assert not set(unfinished) & set(pool._key_of), "a block that is written can be found"


# -- bounded
@pytest.mark.parametrize("window", [1, 4, 6, 13])
def test_a_request_has_as_many_blocks_as_window_and_step_take_however_long_it_is(window: int) -> None:
    loop, scheduler, model = window_loop(window, max_model_len=256)
    loop.submit(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)), lambda _: None)
    most = 0
    while loop.step():
        check_windows(scheduler)
        most = max(most, *(len(request.window_block_ids) for request in scheduler.running), 0)

    assert most <= -(-(window + 8 - 2) // BLOCK) + 1
    assert model.slips == []


def test_blocks_that_no_window_shows_any_more_go_to_others() -> None:
    loop, scheduler, model = window_loop(6, num_window_blocks=5, num_blocks=40, max_model_len=128, prefix_cache=False)
    answer(loop, PROMPT, max_tokens=40)

    assert model.num_calls > 40
    assert scheduler.num_preemptions == 0
    assert model.slips == []


def test_nobody_in_flight_is_preempted_where_windows_alone_run_short() -> None:
    loop, scheduler, model = window_loop(13, num_window_blocks=9, reserve=0.0, max_steps_in_flight=2)
    told: list[list[Any]] = [[], [], []]
    for number, events in enumerate(told):
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        loop.submit(Request(str(number), [number], params), events.append)
    while loop.step():
        check_windows(scheduler)

    assert scheduler.num_preemptions > 0
    assert [events[-1].reason for events in told] == [FinishReason.LENGTH] * 3
    assert model.slips == []


def test_the_share_of_the_cache_in_use_is_that_of_the_scarcer_blocks() -> None:
    loop, scheduler, _ = window_loop(6, num_window_blocks=5, num_blocks=40)
    assert loop.stats().kv_usage == 0.0
    loop.submit(Request("a", PROMPT[:13], SamplingParams(temperature=0.0, max_tokens=9)), lambda _: None)
    loop.step()

    assert scheduler.windows is not None
    assert loop.stats().kv_usage == scheduler.windows.pool.num_used / 5 > scheduler.pool.num_used / 40
    loop.cancel("a")
    loop.step()
    assert loop.stats().kv_usage == 0.0


# -- found again
def test_the_end_of_a_prompt_is_found_again_with_its_window() -> None:
    loop, _, model = window_loop()
    answer(loop, PROMPT)
    before = num_computed(loop)
    second = answer(loop, PROMPT)

    assert second.num_cached_tokens == 76
    assert num_computed(loop) - before == 4 + 5
    assert model.slips == []


def test_a_beginning_whose_window_has_gone_is_computed_again() -> None:
    loop, scheduler, model = window_loop(num_window_blocks=5)
    answer(loop, PROMPT)
    parted = answer(loop, [*PROMPT[:40], 50, 51, 52])

    assert scheduler.pool.num_keyed > 10  # blocks of every token are all there
    assert parted.num_cached_tokens == 0
    assert model.slips == []


def test_an_answer_goes_on_from_the_window_at_its_end() -> None:
    loop, _, model = window_loop()
    first: list[Any] = []
    loop.submit(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)), first.append)
    while loop.step():
        pass
    second = answer(loop, [*PROMPT, *(event.token_id for event in first[:-1]), 7, 8])

    assert second.num_cached_tokens == 88
    assert model.slips == []


def test_a_reset_forgets_windows_as_well() -> None:
    loop, scheduler, _ = window_loop()
    answer(loop, PROMPT)
    loop.reset_prefix_cache()

    assert scheduler.windows is not None
    assert scheduler.windows.pool.num_keyed == 0


def test_what_a_failed_step_left_in_windows_comes_back_in_no_answer() -> None:
    loop, scheduler, model = window_loop()
    model.fail_at = {4}
    loop.submit(Request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=4)), lambda _: None)
    while loop.step():
        pass

    assert scheduler.windows is not None
    assert scheduler.windows.pool.num_keyed == scheduler.windows.pool.num_used == 0


# -- whatever happens
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    ACTIONS,
    st.integers(16, 30),
    st.integers(8, 20),
    st.sampled_from([1, 5, 9, 14]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([3, 8]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sets(st.integers(1, 20), max_size=2),
)
def test_no_block_is_lost_or_shown_to_two_and_every_window_is_whole(
    actions: list[tuple[str, int, int, int]],
    num_blocks: int,
    num_window_blocks: int,
    window: int,
    reserve: float,
    chunk: int,
    prefix_cache: bool,
    max_steps_in_flight: int,
    fail_at: set[int],
) -> None:
    sizes = {"num_blocks": num_blocks, "num_window_blocks": num_window_blocks, "prefix_cache": prefix_cache}
    sizes |= {"prefill_chunk": chunk, "max_steps_in_flight": max_steps_in_flight}
    loop, scheduler, model = window_loop(window, reserve=reserve, max_model_len=60, **sizes)
    model.fail_at = fail_at
    asked: list[tuple[list[int], int, list[Any]]] = []

    def step() -> bool:
        is_more = loop.step()
        check_windows(scheduler)
        return is_more

    for action, number, length, max_tokens in actions:
        if action == "submit":
            prompt = ([number % 2] * 17 + [number] * 30)[:length]
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

    assert scheduler.windows is not None
    assert scheduler.windows.pool.num_used == scheduler.pool.num_used == 0
    assert model.slips == []
    for prompt, max_tokens, events in asked:
        ids = [event.token_id for event in events[:-1]]
        expected = greedy_reference(prompt, max_tokens)
        is_whole = events[-1].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert ids == (expected if is_whole else expected[: len(ids)])


# -- the plan
@given(
    st.integers(1, 8192),
    st.integers(1, 16),
    st.sampled_from([1, 4, 16, 33]),
    st.integers(0, 5000),
    st.builds(Window, st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2])),
    st.integers(0, 1 << 31),
    st.booleans(),
)
def test_a_cache_with_windows_holds_one_full_request_and_no_more_than_it_may(
    context: int, max_num_seqs: int, block_size: int, per_token: int, window: Window, size: int, prefix_cache: bool
) -> None:
    options = SizedOptions(
        max_num_seqs=max_num_seqs, block_size=block_size, prefix_cache=prefix_cache, kv_cache_bytes=size or None
    )
    memory = plan_memory(options, context, Demand(0, per_token, window=window), None)
    num_full, most = -(-context // block_size), window.num_blocks(options, context)
    one_request = block_size * (num_full * per_token + most * window.bytes_per_token)

    assert bool(memory.reasons) == (0 < size < one_request)
    if not memory.reasons:
        used = block_size * (memory.num_blocks * per_token + memory.num_window_blocks * window.bytes_per_token)
        assert memory.num_blocks >= num_full
        assert memory.num_window_blocks >= most
        assert used <= max(size, one_request) if size else used <= max(1 << 30, one_request)
        if used >= max_num_seqs * one_request:
            assert memory.num_window_blocks >= max_num_seqs * most


def test_a_longer_context_fits_where_windows_hide_most_of_it() -> None:
    def advice(window: Window, per_token: int) -> int:
        demand = Demand(0, per_token, window=window)
        [reason] = plan_memory(SizedOptions(max_num_seqs=1), 1 << 20, demand, 1 << 26).reasons
        return int(reason.rsplit("--max-model-len ", 1)[1].split()[0])

    kept, windowed = advice(Window(), 6000), advice(Window(512, 5000), 1000)
    assert 5 * kept < windowed < 6 * kept
    demand = Demand(0, 1000, window=Window(512, 5000))
    assert not plan_memory(SizedOptions(max_num_seqs=1, max_model_len=windowed), 1 << 20, demand, 1 << 26).reasons


# -- which layers keep what
def test_global_layers_come_first_and_a_layer_has_a_place_among_its_kind() -> None:
    spec, local = KVSpec(7, 2, 8, 8), KVSpec(7, 4, 8, 8)
    windows = Windows(5, 3)

    assert windows.caches(spec, local).parts == (KVSpec(2, 2, 8, 8), KVSpec(5, 4, 8, 8, window=5))
    assert [windows.place(layer) for layer in range(7)] == [0, 1, 0, 2, 3, 1, 4]
    assert Windows(None, 3).caches(spec).parts == (spec,)
    assert Windows(5, (True,) * 7).caches(spec).parts == (KVSpec(7, 2, 8, 8, window=5),)


@pytest.mark.parametrize("ops", [ReferenceOps, pytest.param(lambda: cpu_ops(2), marks=needs_native)])
@pytest.mark.parametrize("window", [1, 5, 20])
def test_attention_reads_nothing_of_what_lies_where_a_block_was_given_back(ops: Any, window: int) -> None:
    backend, random = ops(), np.random.default_rng(window)
    spec = AttentionSpec(2, 1, 8, 0.5, window=window)
    table = np.array([[3, 1, 4, 0, 2]], np.int32)
    history = one_sequence(0, 33, table)
    step = one_sequence(33, 40, table)
    k, v, q = (random.standard_normal((40, width)).astype(np.float32) for width in (8, 8, 16))
    vectors = [backend.load_vector(part.reshape(-1)).reshape(part.shape) for part in (k[:33], v[:33], k[33:], v[33:])]
    garbage = backend.load_vector(np.full(64, np.inf, np.float32)).reshape(8, 8)
    found = []
    for is_gone in (False, True):
        cache = backend.new_kv_cache(1, 1, 8, 8, 5, 8, in_windows=True)
        backend.store_kv(cache, 0, *vectors[:2], history)
        if is_gone:  # and another has written on them
            for block in table[0, : max(33 - window + 1, 0) // 8]:
                place = one_sequence(0, 8, np.array([[block]], np.int32))
                backend.store_kv(cache, 0, garbage, garbage, place)
        backend.store_kv(cache, 0, *vectors[2:], step)
        queries = backend.load_vector(q[33:].reshape(-1)).reshape(7, 16)
        found.append(backend.to_numpy(backend.attention(queries, cache, 0, step, spec)).copy())

    assert np.isfinite(found[0]).all()
    assert np.array_equal(found[0], found[1])


def one_sequence(start: int, stop: int, table: npt.NDArray[np.int32]) -> ForwardBatch:
    """A step of tokens [start, stop) of a sequence with these window blocks of 8."""
    positions = np.arange(start, stop)
    return ForwardBatch(
        input_ids=np.zeros(stop - start, np.int32),
        positions=positions.astype(np.int32),
        query_start_loc=np.array([0, stop - start], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_table=np.zeros_like(table),
        slot_mapping=np.zeros(stop - start, np.int64),
        logit_rows=np.zeros(0, np.int32),
        window_table=table,
        window_slots=table[0, positions // 8].astype(np.int64) * 8 + positions % 8,
    )


@needs_native
def test_the_native_backend_refuses_a_step_without_its_windows_blocks() -> None:
    ops = cpu_ops(1)
    cache = ops.new_kv_cache(1, 1, 8, 8, 5, 8, in_windows=True)
    batch = one_sequence(0, 3, np.array([[9]], np.int32))
    rows = np.zeros((3, 8), np.float32)

    with pytest.raises(ValueError, match="window slot 72 is outside 0 to 39"):
        ops.store_kv(cache, 0, rows, rows, batch)
    bare = replace(batch, window_table=np.zeros((0, 0), np.int32), window_slots=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="a step without its windows' blocks"):
        ops.store_kv(cache, 0, rows, rows, bare)
