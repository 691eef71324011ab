"""Recurrent states: a wrong slot, a late copy or a stale snapshot shows up as another answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.drawing import Draw
from pocketllm.engine.lifecycle.kv.state_slots import StateSlots
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.steps.runner import Runner
from tests.fake_device import drawn
from tests.fake_model import VOCAB_SIZE, FakeTokenizer, greedy_reference, limits, logits_of, next_state

BLOCK = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


@dataclass
class RecurrentModel:
    """Its logits come from a state that runs over the tokens, kept in the request's slot and nowhere else.

    It keeps tokens in the paged cache too, and looks whether what lies there is what its state came from.
    """

    num_slots: int
    num_blocks: int
    fail_at: set[int] = field(default_factory=set)
    fails_to_copy: bool = False
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.states = np.arange(-self.num_slots, 0, dtype=np.int64)  # anything
        self.cache = np.full((self.num_blocks, BLOCK), -1, np.int64)

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        self.num_calls += 1
        if self.num_calls in self.fail_at:
            self.states[:] = -1
            raise RuntimeError("the fake model was told to fail")
        assert len(set(batch.state_slots.tolist())) == batch.num_seqs, "two sequences share a slot"
        rows = []
        for seq, slot in enumerate(batch.state_slots):
            first, last = batch.query_start_loc[seq], batch.query_start_loc[seq + 1]
            start = int(batch.seq_lens[seq] - (last - first))
            state = 1 if start == 0 else int(self.states[slot])
            assert state == state_after(self.cache[batch.block_table[seq]].ravel()[:start].tolist())
            self.cache.ravel()[batch.slot_mapping[first:last]] = batch.input_ids[first:last]
            for token in range(first, last):
                state = next_state(state, int(batch.input_ids[token]))
                rows.append(logits_of(state))
            self.states[slot] = state
        return np.array([rows[row] for row in batch.logit_rows], np.float32).reshape(-1, VOCAB_SIZE)

    def copy_blocks(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        if self.fails_to_copy:
            raise RuntimeError("the fake model was told to fail")
        for source, target in zip(sources, targets, strict=True):
            self.cache[target] = self.cache[source]

    def copy(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.states[target] = self.states[source]


def state_after(token_ids: list[int]) -> int:
    state = 1
    for token_id in token_ids:
        state = next_state(state, token_id)
    return state


class InstantDrawer:
    """Obeys backends.api.drawing.Drawer; what it gave is known at once."""

    def __init__(self) -> None:
        self.num_draws = 0

    def draw(self, logits: npt.NDArray[np.float32], draws: Sequence[Draw]) -> Any:
        self.num_draws += len(draws)
        tokens = [drawn(logits[draw.row], draw) for draw in draws]
        return SimpleNamespace(wait=lambda: tokens)

    def capped(self, logits: npt.NDArray[np.float32], cap: float) -> npt.NDArray[np.float32]:
        return cap * np.tanh(logits / cap)


def recurrent_loop(
    num_slots: int = 8, drawer: InstantDrawer | None = None, **changes: Any
) -> tuple[EngineLoop, Scheduler, RecurrentModel]:
    some = limits(num_state_slots=num_slots, **changes)
    scheduler = Scheduler(some, VOCAB_SIZE)
    model = RecurrentModel(num_slots, some.num_blocks)
    take = lambda x, rows: x[rows]  # noqa: E731  # as a backend's operation
    runner = Runner(model.forward, lambda hidden: hidden, BLOCK, take, model.copy, model.copy_blocks)
    if drawer is not None:
        runner.draw_by(drawer, lambda hidden: hidden, np.asarray, some.keeps_prompt_ends)
    return EngineLoop(scheduler, runner, FakeTokenizer()), scheduler, model


def submit(loop: EngineLoop, name: str, prompt: Sequence[int], max_tokens: int = 6) -> list[Any]:
    events: list[Any] = []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    loop.submit(Request(name, list(prompt), params), events.append)
    return events


def finish(loop: EngineLoop) -> None:
    while loop.step():
        pass


def check(events: list[Any], prompt: Sequence[int]) -> FinishEvent:
    ids = [event.token_id for event in events if isinstance(event, TokenEvent)]
    expected = greedy_reference(list(prompt), len(ids))  # ends with the end-of-text token, if it comes
    assert ids[: len(expected)] == expected
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert end.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
    return end


def answer(loop: EngineLoop, name: str, prompt: Sequence[int], max_tokens: int = 6) -> FinishEvent:
    events = submit(loop, name, prompt, max_tokens)
    finish(loop)
    return check(events, prompt)


# -- what is found again
def test_an_equal_prompt_begins_at_the_last_block_before_its_end() -> None:
    loop, scheduler, _ = recurrent_loop()

    assert [answer(loop, name, PROMPT).num_cached_tokens for name in "ab"] == [0, 16]
    assert scheduler.states is not None
    assert scheduler.states.pool.num_used == 0


def test_a_conversation_goes_on_from_the_last_block_of_the_answer() -> None:
    loop, _, _ = recurrent_loop()
    answer(loop, "a", PROMPT, 9)
    turn = [*PROMPT, *greedy_reference(PROMPT, 9), 11, 12]

    assert answer(loop, "b", turn).num_cached_tokens == 24


def test_a_prompt_that_parts_early_begins_where_a_state_was_kept_not_where_blocks_are() -> None:
    loop, _, _ = recurrent_loop(prefill_chunk=8)
    answer(loop, "a", PROMPT)
    parted = [*PROMPT[:13], 90, 91, 92, 93, 94]

    assert answer(loop, "b", parted).num_cached_tokens == 8  # blocks of 12 are there, a state after 8


def test_what_many_prompts_begin_with_is_computed_twice_and_then_found() -> None:
    loop, _, _ = recurrent_loop(prefill_chunk=16)
    shared = PROMPT[:13]
    found = [
        answer(loop, name, [*shared, 80 + place, *PROMPT], 1).num_cached_tokens for place, name in enumerate("abc")
    ]

    assert found == [0, 0, 12]


def test_without_a_prefix_cache_no_step_is_cut_and_nothing_is_copied() -> None:
    loop, scheduler, model = recurrent_loop(prefix_cache=False, prefill_chunk=32, max_num_batched_tokens=32)
    answer(loop, "a", PROMPT, 1)

    assert model.num_calls == 1
    assert scheduler.states is not None
    assert scheduler.states.take_copies() == ()


def test_of_an_answer_one_snapshot_is_kept_however_long_it_is() -> None:
    loop, scheduler, _ = recurrent_loop()
    answer(loop, "a", PROMPT, 40)

    assert scheduler.states is not None
    # after 8 and 16 tokens of the prompt, and the last whole block of the answer
    assert scheduler.states.pool.num_keyed == 3


def test_when_room_is_short_the_longest_idle_snapshot_goes() -> None:
    loop, _, _ = recurrent_loop(num_slots=2, max_num_seqs=1)
    other = [40 + token for token in PROMPT]
    answer(loop, "a", PROMPT, 1)
    answer(loop, "b", other, 1)

    assert answer(loop, "c", other, 1).num_cached_tokens == 16
    assert answer(loop, "d", PROMPT, 1).num_cached_tokens == 0


def test_a_reset_forgets_snapshots_as_well() -> None:
    loop, scheduler, _ = recurrent_loop()
    answer(loop, "a", PROMPT)
    loop.reset_prefix_cache()

    assert scheduler.states is not None
    assert scheduler.states.pool.num_keyed == 0
    assert answer(loop, "b", PROMPT).num_cached_tokens == 0


def test_what_a_failed_step_left_in_states_comes_back_in_no_answer() -> None:
    loop, _, model = recurrent_loop()
    answer(loop, "a", PROMPT)
    model.fail_at = {model.num_calls + 1}
    events = submit(loop, "b", PROMPT)
    finish(loop)

    assert events[-1].reason is FinishReason.ERROR
    assert answer(loop, "c", PROMPT).num_cached_tokens == 0


# -- the ends of prompts
@pytest.mark.parametrize("length", [18, 16, 3])
def test_a_prompt_that_is_repeated_whole_computes_nothing(length: int) -> None:
    loop, scheduler, model = recurrent_loop(keeps_prompt_ends=True)
    answer(loop, "a", PROMPT[:length])
    before = model.num_calls
    again = answer(loop, "b", PROMPT[:length], 1)

    assert (again.num_cached_tokens, model.num_calls) == (length, before)
    assert answer(loop, "c", PROMPT[:length], 20).num_cached_tokens == length
    assert scheduler.states is not None
    assert (scheduler.pool.num_used, scheduler.states.pool.num_used) == (0, 0)


def test_ends_are_kept_where_a_device_draws_all_tokens_but_the_first() -> None:
    drawer = InstantDrawer()
    loop, _, model = recurrent_loop(drawer=drawer, keeps_prompt_ends=True)
    answer(loop, "a", PROMPT, 6)
    before, drawn_before = model.num_calls, drawer.num_draws
    again = answer(loop, "b", PROMPT, 3)

    assert (again.num_cached_tokens, model.num_calls) == (len(PROMPT), before + 2)
    assert (drawn_before, drawer.num_draws) == (5, 7)


def test_an_end_is_kept_for_its_own_prompt_alone() -> None:
    loop, _, model = recurrent_loop(keeps_prompt_ends=True)
    answer(loop, "a", PROMPT)
    before = model.num_calls
    for name, prompt in (("b", PROMPT[:17]), ("c", [*PROMPT, 3]), ("d", [*PROMPT[:17], 9])):
        answer(loop, name, prompt, 1)

    assert model.num_calls >= before + 3


def test_a_request_that_begins_at_an_end_goes_on_beside_others() -> None:
    loop, _, _ = recurrent_loop(keeps_prompt_ends=True)
    answer(loop, "a", PROMPT, 1)
    prompts = [PROMPT, [*PROMPT, 1, 2, 3], PROMPT, PROMPT[:5]]
    events = [submit(loop, str(number), prompt, 9) for number, prompt in enumerate(prompts)]
    finish(loop)

    for some, prompt in zip(events, prompts, strict=True):
        assert check(some, prompt).num_output_tokens == 9


def test_an_end_is_forgotten_with_the_rest_and_after_a_failed_step() -> None:
    loop, _, model = recurrent_loop(keeps_prompt_ends=True)
    answer(loop, "a", PROMPT)
    loop.reset_prefix_cache()
    assert answer(loop, "b", PROMPT).num_cached_tokens == 0
    model.fail_at = {model.num_calls + 1}
    submit(loop, "c", PROMPT[::-1])
    finish(loop)

    assert answer(loop, "d", PROMPT).num_cached_tokens == 0


def test_a_copy_of_a_last_block_that_failed_is_made_again() -> None:
    loop, _, model = recurrent_loop(keeps_prompt_ends=True)
    model.fails_to_copy = True
    events = submit(loop, "a", PROMPT)
    finish(loop)
    assert events[-1].reason is FinishReason.ERROR
    model.fails_to_copy = False

    assert [answer(loop, name, PROMPT).num_cached_tokens for name in "bc"] == [0, len(PROMPT)]


# -- width and preemption
def test_requests_that_are_preempted_give_the_tokens_they_give_alone() -> None:
    loop, scheduler, _ = recurrent_loop(num_blocks=14, reserve=0.0)
    prompts = [[number, *PROMPT[:9]] for number in range(4)]
    events = [submit(loop, str(number), prompt, 16) for number, prompt in enumerate(prompts)]
    finish(loop)

    assert scheduler.num_preemptions > 0
    for some, prompt in zip(events, prompts, strict=True):
        assert check(some, prompt).num_output_tokens == 16


def test_every_running_request_advances_in_every_step_however_others_are_cut() -> None:
    loop, scheduler, _ = recurrent_loop(block_size=4, prefill_chunk=16, max_num_batched_tokens=17, max_num_seqs=4)
    for number in range(4):
        submit(loop, str(number), [number] * (19 + 3 * number), 8)
    has_work = True
    while has_work:
        before = {request: request.num_computed_tokens for request in scheduler.running}
        has_work = loop.step()
        for request in scheduler.running:
            assert request.num_computed_tokens > before.get(request, -1)


PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=8) | st.lists(st.just(1), min_size=1, max_size=30)


@settings(max_examples=60)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=9),
    width=st.integers(1, 4),
    spare=st.integers(0, 4),
    num_blocks=st.integers(16, 40),
    chunk=st.sampled_from([3, 4, 8, 16]),
    reserve=st.sampled_from([0.0, 1.0]),
    ends=st.booleans(),
    cancelled=st.sets(st.integers(0, 8), max_size=2),
)
def test_any_load_gets_the_answers_that_each_request_gets_alone(
    prompts: list[tuple[list[int], int, int]],
    width: int,
    spare: int,
    num_blocks: int,
    chunk: int,
    reserve: float,
    ends: bool,
    cancelled: set[int],
) -> None:
    loop, scheduler, _ = recurrent_loop(
        width + spare,
        max_num_seqs=width,
        num_blocks=num_blocks,
        prefill_chunk=chunk,
        reserve=reserve,
        keeps_prompt_ends=ends,
    )
    events = []
    for number, (prompt, max_tokens, pause) in enumerate(prompts):
        events.append(submit(loop, str(number), prompt, max_tokens))
        for _ in range(pause):
            loop.step()
        if number in cancelled:
            loop.cancel(str(number))
    finish(loop)

    for number, (some, (prompt, max_tokens, _)) in enumerate(zip(events, prompts, strict=True)):
        end = check(some, prompt)
        assert number in cancelled or end.num_output_tokens == max_tokens
    assert scheduler.states is not None
    assert (scheduler.pool.num_used, scheduler.states.pool.num_used) == (0, 0)


def test_a_snapshot_is_never_the_room_that_its_own_request_is_given() -> None:
    states = StateSlots(2)
    first = Request("a", PROMPT, SamplingParams())
    states.open(first, None)
    first.num_computed_tokens = 4
    states.save(first, b"key")
    states.close(first)
    states.take_copies()
    second = Request("b", PROMPT, SamplingParams())

    assert states.can_restore(b"key")
    states.open(second, b"key")
    [(source, target)] = states.take_copies()
    assert source != target == second.state_slot


def test_a_single_slot_has_no_room_for_a_snapshot() -> None:
    loop, _, _ = recurrent_loop(num_slots=1, max_num_seqs=1)

    assert [answer(loop, name, PROMPT, 2).num_cached_tokens for name in "ab"] == [0, 0]
