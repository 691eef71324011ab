"""With a step in flight every request gets the tokens, texts and end that it gets one step at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.structured import constraint
from tests.fake_device import loop_on_device
from tests.fake_model import EOS, FakeModel, fake_loop, greedy_reference, logits_after
from tests.unit.test_loop import PROMPTS, Inbox, prompt_before_eos, run, submit

MakeLoop = Callable[..., tuple[EngineLoop, Scheduler, Any]]
WAYS: dict[str, MakeLoop] = {
    "drawn by the host": lambda **changes: fake_loop(**{"max_steps_in_flight": 2, **changes}),
    "drawn by the device": loop_on_device,
}
in_each_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)


# -- what is in flight
def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known() -> None:
    loop, _, device = loop_on_device()
    inbox = submit(loop, [1, 2, 3])
    loop.step()
    assert (device.model.num_calls, inbox.token_ids) == (0, [])
    loop.step()

    # to know the first token the device has run one step; the second lies in its queue, and its draw behind it
    assert (device.model.num_calls, len(device.queue)) == (1, 2)
    assert inbox.token_ids == greedy_reference([1, 2, 3], 1)
    run(loop)
    assert inbox.token_ids == greedy_reference([1, 2, 3], 10)


@in_each_way
def test_what_a_request_has_too_many_when_it_stops_is_discarded(make: MakeLoop) -> None:
    loop, scheduler, _ = make()
    stopped = submit(loop, prompt_before_eos(), "stopped")
    other = submit(loop, [1, 2, 3], "other", ignore_eos=True)
    run(loop)

    assert stopped.token_ids == [EOS]
    assert stopped.finish.reason is FinishReason.STOP
    assert len(other.token_ids) == 10
    assert scheduler.pool.num_used == 0
    assert loop.stats().num_step_tokens == 2 + 3 + 9 + 1


@in_each_way
def test_nothing_is_computed_behind_a_token_that_is_known_to_be_the_last(make: MakeLoop) -> None:
    loop, _, _ = make()
    inbox = submit(loop, [1, 2, 3], max_tokens=4, ignore_eos=True)
    run(loop)

    assert len(inbox.token_ids) == 4
    assert loop.stats().num_step_tokens == 3 + 3


@in_each_way
def test_a_cancelled_request_takes_no_more_tokens_and_the_next_one_has_its_blocks(make: MakeLoop) -> None:
    loop, scheduler, _ = make(num_blocks=4, max_num_seqs=1)
    first = submit(loop, [1, 2, 3], "first", ignore_eos=True, max_tokens=13)
    second = submit(loop, [7] * 9, "second", ignore_eos=True, max_tokens=7)
    for _ in range(4):
        loop.step()
    loop.cancel("first")
    run(loop)

    assert first.finish.reason is FinishReason.CANCELLED
    assert 0 < len(first.token_ids) < 13
    assert first.token_ids == greedy_reference([1, 2, 3], 13)[: len(first.token_ids)]
    assert second.token_ids[:1] == greedy_reference([7] * 9, 1)
    assert len(second.token_ids) == 7
    assert scheduler.pool.num_used == 0


@in_each_way
def test_nobody_is_preempted_for_blocks_that_the_step_in_flight_may_free(make: MakeLoop) -> None:
    loop, scheduler, _ = make(reserve=0.0, num_blocks=8)
    inboxes = [submit(loop, [number] * 7, str(number), max_tokens=12, ignore_eos=True) for number in (1, 2, 3)]
    run(loop)

    assert scheduler.num_preemptions > 0, "this case is meant to preempt"
    alone = [answer_alone([number] * 7) for number in (1, 2, 3)]
    assert [inbox.token_ids for inbox in inboxes] == alone


def answer_alone(prompt: list[int]) -> list[int]:
    loop, _, _ = fake_loop()
    inbox = submit(loop, prompt, max_tokens=12, ignore_eos=True)
    run(loop)
    return inbox.token_ids


@in_each_way
def test_events_are_told_at_the_latest_when_nothing_is_in_flight_any_more(make: MakeLoop) -> None:
    loop, _, _ = make()
    told: list[str] = []
    loop.on_step_end(lambda: told.append("end"))
    loop.submit(Request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2)), lambda event: told.append("a"))
    run(loop)

    assert told.count("a") == 3
    assert told[-1] == "end"


def test_a_stopped_loop_leaves_no_step_in_flight() -> None:
    loop, scheduler, _ = loop_on_device()
    loop.start()
    inbox = submit(loop, [1, 2, 3])
    loop.stop(timeout_s=10.0)

    assert inbox.token_ids == greedy_reference([1, 2, 3], 10)
    assert not loop._steps.is_in_flight
    assert scheduler.pool.num_used == 0


# -- what ends badly
@in_each_way
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_one_request_only(make: MakeLoop, poison: float) -> None:
    class Poisoned(FakeModel):
        def forward(self, batch: Any, cache: Any) -> Any:
            logits = super().forward(batch, cache)
            if self.num_calls == 3:
                logits[0, 5] = poison
            return logits

    loop, scheduler, _ = make(model=Poisoned(64, 4))
    inboxes = [submit(loop, [number], str(number)) for number in range(2)]
    run(loop)

    assert [inbox.finish.reason.value for inbox in inboxes] == ["error", "length"]
    assert "not finite" in str(inboxes[0].finish.error)
    assert inboxes[1].token_ids == greedy_reference([1], 10)
    assert scheduler.pool.num_used == 0


@in_each_way
def test_a_failed_step_ends_its_requests_and_later_ones_are_served(make: MakeLoop) -> None:
    model = FakeModel(64, 4, fail_at={3})
    loop, scheduler, _ = make(model=model, max_num_seqs=2)
    inboxes = [submit(loop, [number], str(number)) for number in range(3)]
    run(loop)

    assert [inbox.finish.reason.value for inbox in inboxes] == ["error", "error", "length"]
    assert "RuntimeError" in str(inboxes[0].finish.error)
    assert inboxes[0].token_ids == greedy_reference([0], 2)
    assert inboxes[2].token_ids == greedy_reference([2], 10)
    assert scheduler.pool.num_used == 0


# -- any sequence of arrivals, cancels and steps
PARAMS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 11, "ignore_eos": True},
    {"stop": ("A", "b"), "ignore_eos": True},
    {"stop_token_ids": tuple(range(0, 96, 7))},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {3: 5.0}, "ignore_eos": True},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "temperature": 0.3, "seed": 1},
    {"min_tokens": 1, "bad_words": ("C",)},
    {"allowed_token_ids": (4, 9, 30), "temperature": 3.0, "seed": 5},
    {"logprobs": 3, "temperature": 1.0, "seed": 2},
    {"mirostat": 2, "seed": 3},
    {"xtc_probability": 0.7, "seed": 4},
    {"prompt_logprobs": 2},
    {"constraint": constraint.regex("[A-D]{2,9}")},
    {"constraint": constraint.regex("(AB|CD)+"), "temperature": 1.0, "seed": 8},
]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 12), st.integers(0, len(PARAMS) - 1)),
        st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0), st.just(0)),
    ),
    max_size=25,
)
Told = tuple[list[tuple[Any, ...]], FinishEvent]


def told(make: MakeLoop, actions: list[tuple[str, int, int, int]], changes: dict[str, Any]) -> list[Told]:
    """What each request was told, and its end."""
    loop, scheduler, _ = make(**changes)
    inboxes: list[Inbox] = []
    for action, number, max_tokens, kind in actions:
        if action == "submit":
            inboxes.append(Inbox())
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "seed": 6, **PARAMS[kind]})
            loop.submit(Request(str(len(inboxes) - 1), [number % 5 + 1] * number, params), inboxes[-1])
        elif action == "cancel":
            loop.cancel(str(number))
        else:
            for _ in range(number):
                loop.step()
    run(loop)
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work
    return [([shown(event) for event in inbox.events[:-1]], inbox.finish) for inbox in inboxes]


def shown(event: Event) -> tuple[Any, ...]:
    assert isinstance(event, TokenEvent)
    return event.token_id, event.text, event.logprobs


@settings(max_examples=60, deadline=None)
@given(
    ACTIONS,
    st.sampled_from([0.0, 1.0]),
    st.integers(9, 30),
    st.sampled_from([{}, {"prefill_chunk": 3}, {"max_num_seqs": 2}, {"prefix_cache": False}]),
)
def test_a_step_in_flight_changes_nothing_that_a_request_is_told(
    actions: list[tuple[str, int, int, int]], reserve: float, num_blocks: int, changes: dict[str, Any]
) -> None:
    changes = {"reserve": reserve, "num_blocks": num_blocks, "prefix_cache": True, **changes}
    expected = told(lambda **some: fake_loop(**some), actions, changes)
    for make in WAYS.values():
        for (events, end), (other_events, other_end) in zip(told(make, actions, changes), expected, strict=True):
            if FinishReason.CANCELLED in (end.reason, other_end.reason):
                both = min(len(events), len(other_events))
                assert events[:both] == other_events[:both]
            else:
                assert events == other_events
                assert as_told(end) == as_told(other_end)


def as_told(end: FinishEvent) -> tuple[Any, ...]:
    return end.reason, end.text, end.num_output_tokens, end.stop_string, end.error, end.seed


def test_prompt_logits_are_those_of_every_position() -> None:
    loop, _, _ = loop_on_device(prefill_chunk=3)
    submit(loop, [5, 6], "other", ignore_eos=True)
    inbox = Inbox()
    loop.submit(Request("r", PROMPTS[2], SamplingParams(), wants_prompt_logits=True), inbox)
    run(loop)

    expected = [logits_after(PROMPTS[2][: end + 1]) for end in range(len(PROMPTS[2]))]
    np.testing.assert_array_equal(inbox.finish.prompt_logits, np.array(expected))
