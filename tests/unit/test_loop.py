import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.errors import QueueFullError, RequestError
from tests.fake_model import EOS, FakeModel, FakeTokenizer, fake_loop, greedy_reference, logits_after

PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3, 2, 1] * 2, [33] * 11, [70, 71], [2] * 30, [64, 3, 64], [12] * 7]


class Inbox:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> FinishEvent:
        [finish] = [event for event in self.events if isinstance(event, FinishEvent)]
        assert self.events[-1] is finish
        return finish


def submit(loop: EngineLoop, prompt: list[int], name: str = "r", **params: Any) -> Inbox:
    inbox = Inbox()
    params = {"temperature": 0.0, "max_tokens": 10, **params}
    loop.submit(Request(name, prompt, SamplingParams(**params)), inbox)
    return inbox


def run(loop: EngineLoop) -> None:
    for _ in range(10_000):
        if not loop.step():
            return
    raise AssertionError("the loop does not come to an end")


# -- answers
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_request_gets_the_tokens_that_the_model_says(prompt: list[int]) -> None:
    loop, _, _ = fake_loop()
    inbox = submit(loop, prompt)
    run(loop)

    assert inbox.token_ids == greedy_reference(prompt, 10)


@pytest.mark.parametrize("changes", [{}, {"reserve": 0.0, "num_blocks": 12}, {"max_num_seqs": 8, "prefill_chunk": 3}])
def test_eight_at_once_get_the_same_tokens_as_one_at_a_time(changes: dict[str, Any]) -> None:
    loop, scheduler, _ = fake_loop(**changes)
    inboxes = [submit(loop, prompt, str(number)) for number, prompt in enumerate(PROMPTS)]
    run(loop)

    assert [inbox.token_ids for inbox in inboxes] == [greedy_reference(prompt, 10) for prompt in PROMPTS]
    if "reserve" in changes:
        assert scheduler.num_preemptions > 0, "this case is meant to preempt"


def test_a_seeded_request_draws_the_same_whatever_its_neighbors() -> None:
    def draws(num_neighbors: int, **changes: Any) -> list[int]:
        loop, _, _ = fake_loop(**changes)
        inbox = submit(loop, [1, 2, 3], "seeded", temperature=1.0, seed=42, ignore_eos=True)
        for number in range(num_neighbors):
            submit(loop, [number + 1] * (number + 1), str(number), temperature=1.0)
        run(loop)
        return inbox.token_ids

    alone = draws(0)

    assert all(draws(neighbors) == alone for neighbors in range(1, 4))
    assert draws(3, max_num_seqs=2, prefill_chunk=2) == alone


def test_a_request_recomputed_after_preemption_continues_its_random_stream() -> None:
    def draws(**changes: Any) -> tuple[list[int], int]:
        loop, _, _ = fake_loop(**changes)
        submit(loop, [1] * 9, "old", ignore_eos=True, max_tokens=12)
        request = Request("young", [2] * 9, SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True))
        inbox = Inbox()
        loop.submit(request, inbox)
        run(loop)
        return inbox.token_ids, request.num_preemptions

    expected, none = draws()
    recomputed, some = draws(num_blocks=6, reserve=0.0)

    assert (none, some > 0) == (0, True)
    assert recomputed == expected


def test_prompt_logits_are_those_of_every_position() -> None:
    loop, scheduler, _ = fake_loop()
    inbox = Inbox()
    prompt = PROMPTS[2]
    loop.submit(Request("r", prompt, SamplingParams(), wants_prompt_logits=True), inbox)
    run(loop)

    expected = np.array([logits_after(prompt[: end + 1]) for end in range(len(prompt))])
    assert inbox.finish.prompt_logits is not None
    np.testing.assert_array_equal(inbox.finish.prompt_logits, expected)
    assert inbox.token_ids == []
    assert scheduler.pool.num_used == 0


def test_prompt_logits_survive_preemption_and_neighbors() -> None:
    loop, _, model = fake_loop(reserve=0.0, num_blocks=9)
    others = [submit(loop, [number] * 6, str(number), ignore_eos=True, max_tokens=14) for number in range(2)]
    inbox = Inbox()
    loop.submit(Request("r", [4] * 20, SamplingParams(), wants_prompt_logits=True), inbox)
    run(loop)

    assert inbox.finish.prompt_logits is not None
    np.testing.assert_array_equal(inbox.finish.prompt_logits[-1], logits_after([4] * 20))
    assert all(len(other.token_ids) == 14 for other in others)
    assert model.num_calls > 0


def log_softmax(logits: Any) -> Any:
    values = np.asarray(logits, np.float64)
    return values - np.log(np.exp(values - values.max()).sum()) - values.max()


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("changes", [{}, {"prefill_chunk": 3}, {"reserve": 0.0, "num_blocks": 9, "prefill_chunk": 3}])
def test_prompt_logprobs_are_each_tokens_own_beside_neighbors(changes: dict[str, Any], max_tokens: int) -> None:
    loop, scheduler, _ = fake_loop(**changes)
    others = [submit(loop, [number] * 6, str(number), ignore_eos=True, max_tokens=14) for number in range(2)]
    prompt = PROMPTS[2]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=3, ignore_eos=True)
    for name in ("first", "again"):  # the second finds the first's blocks in the cache, and must not use them
        request, inbox = Request(name, prompt, params), Inbox()
        loop.submit(request, inbox)
        run(loop)

        expected = [log_softmax(logits_after(prompt[:end])) for end in range(1, len(prompt))]
        assert inbox.token_ids == (greedy_reference(prompt, max_tokens) if max_tokens else [])
        assert inbox.finish.reason is FinishReason.LENGTH
        assert request.prompt_logprobs[0] is None
        assert len(request.prompt_logprobs) == len(prompt)
        for row, token_id, found in zip(expected, prompt[1:], request.prompt_logprobs[1:], strict=True):
            assert found is not None
            assert found.chosen == pytest.approx(row[token_id], abs=1e-5)
            assert found.rank == 1 + (row > row[token_id]).sum()
            np.testing.assert_allclose(found.top_logprobs, np.sort(row)[::-1][:3], atol=1e-5)
    assert all(len(other.token_ids) == 14 for other in others)
    assert scheduler.pool.num_used == 0


def test_sixteen_that_wait_are_admitted_in_one_forward_pass_with_a_row_of_logits_each() -> None:
    loop, _, model = fake_loop(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=256)
    inboxes = [submit(loop, [number, 2, 3, 4][: 1 + number % 4], str(number), max_tokens=3) for number in range(16)]
    loop.step()
    [wave] = model.batches

    assert wave.num_seqs == 16
    assert wave.num_tokens == 40
    assert wave.logit_rows.tolist() == (wave.query_start_loc[1:] - 1).tolist()
    assert all(len(inbox.token_ids) == 1 for inbox in inboxes)
    run(loop)
    assert model.num_calls == 3


def test_a_chunk_that_ends_before_its_prompt_does_asks_for_no_logits() -> None:
    class Counted(FakeModel):
        rows: list[int]

        def logits(self, hidden: Any) -> Any:
            self.rows.append(len(hidden))
            return hidden

    model = Counted(64, 4)
    model.rows = []
    loop, _, _ = fake_loop(model, prefill_chunk=8, max_num_batched_tokens=16)
    submit(loop, [1] * 20, "long", max_tokens=2)
    for _ in range(2):
        loop.step()
    submit(loop, [2], "short", max_tokens=1)
    run(loop)

    assert [len(batch.logit_rows) for batch in model.batches] == [0, 0, 2, 1]
    assert model.rows == [2, 1]


# -- the end of a request
def end_of(prompt: list[int]) -> int:
    return greedy_reference(prompt, 1)[0]


def prompt_before_eos() -> list[int]:
    """A short prompt whose likeliest next token is the end token."""
    return next([a, b] for a in range(90) for b in range(90) if end_of([a, b]) == EOS)


def test_the_end_token_stops_and_has_no_text() -> None:
    loop, _, _ = fake_loop()
    inbox = submit(loop, prompt_before_eos())
    run(loop)

    assert inbox.token_ids == [EOS]
    assert inbox.text == ""
    assert inbox.finish.reason is FinishReason.STOP


def test_ignore_eos_goes_on() -> None:
    loop, _, _ = fake_loop()
    inbox = submit(loop, prompt_before_eos(), ignore_eos=True)
    run(loop)

    assert len(inbox.token_ids) == 10
    assert inbox.finish.reason is FinishReason.LENGTH


def test_a_stop_token_id_stops() -> None:
    loop, _, _ = fake_loop()
    expected = greedy_reference([1, 2, 3], 10)
    inbox = submit(loop, [1, 2, 3], stop_token_ids=(expected[4],), ignore_eos=True)
    run(loop)

    assert inbox.token_ids == expected[: expected.index(expected[4]) + 1]
    assert inbox.finish.reason is FinishReason.STOP


def test_a_stop_string_ends_the_request_in_the_step_that_completes_it() -> None:
    loop, scheduler, model = fake_loop()
    expected = greedy_reference([1, 2, 3], 10)
    letters = "".join(chr(65 + token_id) for token_id in expected)
    inbox = submit(loop, [1, 2, 3], stop=(letters[3:5],))
    run(loop)

    assert inbox.text == letters[:3]
    assert inbox.token_ids == expected[:5]
    assert inbox.finish.reason is FinishReason.STOP
    assert inbox.finish.stop_string == letters[3:5]
    assert model.num_calls == 5
    assert scheduler.pool.num_used == 0


def test_text_held_back_for_a_stop_string_comes_with_the_last_event() -> None:
    loop, _, _ = fake_loop()
    letters = "".join(chr(65 + token_id) for token_id in greedy_reference([1, 2, 3], 10))
    inbox = submit(loop, [1, 2, 3], stop=(letters[9] + "never",))
    run(loop)

    assert inbox.text == letters
    assert inbox.finish.text == letters[9]
    assert inbox.finish.reason is FinishReason.LENGTH


def test_a_stop_string_completed_by_what_was_held_back_is_a_stop() -> None:
    class Halves(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"\xe2"

    loop, _, _ = fake_loop(tokenizer=Halves())
    inbox = submit(loop, [1, 2, 3], max_tokens=1, stop=("\ufffd",), ignore_eos=True)
    run(loop)

    assert inbox.text == ""
    assert inbox.finish.reason is FinishReason.STOP
    assert inbox.finish.stop_string == "\ufffd"


def test_the_answer_ends_with_the_context() -> None:
    loop, _, _ = fake_loop(max_model_len=12)
    inbox = submit(loop, [1] * 8, max_tokens=None, ignore_eos=True)
    run(loop)

    assert len(inbox.token_ids) == 4
    assert inbox.finish.reason is FinishReason.LENGTH


def test_the_phases_of_a_request_are_stamped_in_order() -> None:
    loop, _, _ = fake_loop()
    inbox = submit(loop, [1, 2])
    run(loop)
    times = inbox.finish.times
    stamps = [times.submitted_s, times.scheduled_s, times.first_token_s, times.last_token_s, times.finished_s]

    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]  # none is None


# -- cancel
def test_a_cancelled_request_frees_its_blocks() -> None:
    loop, scheduler, _ = fake_loop()
    inbox = submit(loop, [1, 2, 3])
    loop.step()
    assert loop.cancel("r")
    run(loop)

    assert scheduler.pool.num_used == 0
    assert inbox.finish.reason is FinishReason.CANCELLED
    assert len(inbox.token_ids) == 1


def test_cancel_takes_effect_between_prefill_chunks() -> None:
    loop, scheduler, model = fake_loop()
    inbox = submit(loop, [1] * 40)
    loop.step()
    loop.step()
    loop.cancel("r")
    loop.step()

    assert model.num_calls == 2
    assert inbox.token_ids == []
    assert inbox.finish.reason is FinishReason.CANCELLED
    assert scheduler.pool.num_used == 0


def test_cancel_before_the_first_step_and_of_nothing() -> None:
    loop, _, model = fake_loop()
    inbox = submit(loop, [1, 2, 3])

    assert loop.cancel("r")
    assert not loop.cancel("nobody")
    assert not loop.step()
    assert inbox.finish.reason is FinishReason.CANCELLED
    assert model.num_calls == 0


def test_a_cancel_that_overtakes_its_submit_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, scheduler, model = fake_loop()
    enter = loop._enter

    def enter_and_cancel(active: Any) -> None:
        enter(active)
        loop.cancel("r")  # another thread, before the inbox has the request

    monkeypatch.setattr(loop, "_enter", enter_and_cancel)
    inbox = submit(loop, [1, 2, 3])
    run(loop)

    assert inbox.finish.reason is FinishReason.CANCELLED
    assert model.num_calls == 0
    assert not scheduler.has_work


def test_a_name_can_be_used_again_after_the_end() -> None:
    loop, _, _ = fake_loop()
    first = submit(loop, [1])
    with pytest.raises(RequestError, match="in use"):
        submit(loop, [2])
    run(loop)
    second = submit(loop, [2])
    run(loop)

    assert first.token_ids == greedy_reference([1], 10)
    assert second.token_ids == greedy_reference([2], 10)


# -- what must not kill the loop
def test_a_failed_forward_pass_ends_its_requests_and_the_loop_goes_on() -> None:
    loop, scheduler, model = fake_loop(max_num_seqs=2)
    model.fail_at = {2}
    inboxes = [submit(loop, [number], str(number)) for number in range(3)]
    run(loop)

    assert [inbox.finish.reason.value for inbox in inboxes] == ["error", "error", "length"]
    assert "RuntimeError" in str(inboxes[0].finish.error)
    assert inboxes[2].token_ids == greedy_reference([2], 10)
    assert scheduler.pool.num_used == 0
    assert loop.stats().num_failed_steps == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_one_request_only(poison: float) -> None:
    class Poisoned(FakeModel):
        def logits(self, hidden: Any) -> Any:
            hidden = hidden.copy()
            if self.num_calls == 3:
                hidden[0, 5] = poison
            return hidden

    loop, scheduler, _ = fake_loop(Poisoned(64, 4))
    inboxes = [submit(loop, [number], str(number)) for number in range(2)]
    run(loop)

    assert [inbox.finish.reason.value for inbox in inboxes] == ["error", "length"]
    assert "not finite" in str(inboxes[0].finish.error)
    assert scheduler.pool.num_used == 0


def test_a_sink_that_raises_cancels_its_request_only() -> None:
    loop, scheduler, _ = fake_loop()
    calls = Counter[str]()

    def broken(event: Event) -> None:
        calls[type(event).__name__] += 1
        raise RuntimeError("nobody is listening")

    loop.submit(Request("broken", [1], SamplingParams(temperature=0, max_tokens=10)), broken)
    inbox = submit(loop, [2])
    run(loop)

    assert calls == {"TokenEvent": 1, "FinishEvent": 1}
    assert inbox.token_ids == greedy_reference([2], 10)
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("prompt", [[], [-1], [97], [1] * 64])
def test_a_refused_request_leaves_nothing_behind(prompt: list[int]) -> None:
    loop, _, _ = fake_loop()
    with pytest.raises(RequestError):
        submit(loop, prompt, max_tokens=None)
    inbox = submit(loop, [2])
    run(loop)

    assert inbox.token_ids == greedy_reference([2], 10)
    assert loop.stats().num_rejected == 1


def test_a_full_queue_says_come_back_later() -> None:
    loop, _, _ = fake_loop(max_num_seqs=1, max_queued_requests=2)
    for number in range(3):
        submit(loop, [1], str(number))

    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        submit(loop, [1], "one too many")
    run(loop)
    submit(loop, [1], "later")


# -- exactly one terminal event, whatever happens
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(
    ACTIONS,
    st.sets(st.integers(1, 30), max_size=3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(11, 30),
    st.sampled_from([{}, {"prefill_chunk": 3}, {"max_num_seqs": 2}]),
    st.sets(st.integers(0, 20), max_size=2),
)
def test_every_request_ends_in_exactly_one_terminal_event(
    actions: list[tuple[str, int, int]],
    fail_at: set[int],
    reserve: float,
    num_blocks: int,
    changes: dict[str, Any],
    broken_sinks: set[int],
) -> None:
    loop, scheduler, model = fake_loop(reserve=reserve, num_blocks=num_blocks, **changes)
    model.fail_at = fail_at
    inboxes: list[tuple[list[int], int, Inbox]] = []
    for action, number, max_tokens in actions:
        if action == "submit":
            inbox = Inbox()
            name, is_broken = str(len(inboxes)), len(inboxes) in broken_sinks

            def sink(event: Event, inbox: Inbox = inbox, is_broken: bool = is_broken) -> None:
                inbox(event)
                if is_broken:
                    raise RuntimeError("broken sink")

            prompt = [number + max_tokens] * number
            inboxes.append((prompt, max_tokens, inbox))
            loop.submit(Request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens)), sink)
        elif action == "cancel":
            loop.cancel(str(number))
        else:
            for _ in range(number):
                loop.step()
    run(loop)

    for prompt, max_tokens, inbox in inboxes:
        expected = greedy_reference(prompt, max_tokens)
        assert inbox.token_ids == expected[: len(inbox.token_ids)]
        if inbox.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert inbox.token_ids == expected
        assert inbox.finish.num_output_tokens == len(inbox.token_ids)
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work
    stats = loop.stats()
    assert sum(stats.finished.values()) == len(inboxes) == stats.num_submitted
    assert stats.num_running == stats.num_waiting == 0


# -- the thread
def test_the_end_of_a_step_is_told_after_its_events_and_also_after_a_cancel() -> None:
    loop, _, _ = fake_loop()
    told: list[str] = []
    loop.on_step_end(lambda: told.append("end"))
    for name in "ab":
        request = Request(name, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        loop.submit(request, lambda event: told.append(event.request_id))
    loop.step()
    loop.cancel("b")
    loop.step()

    assert told == ["a", "b", "end", "b", "a", "a", "end"]


def test_a_loop_with_a_thread_serves_many_threads_and_drains_when_stopped() -> None:
    loop, scheduler, _ = fake_loop()
    loop.start()
    inboxes: dict[int, Inbox] = {}

    def client(number: int) -> None:
        inboxes[number] = submit(loop, PROMPTS[number], f"client-{number}")
        if number % 4 == 3:
            loop.cancel(f"client-{number}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.stop(timeout_s=30.0)

    for number, inbox in inboxes.items():
        expected = greedy_reference(PROMPTS[number], 10)
        assert inbox.token_ids == expected[: len(inbox.token_ids)]
        if number % 4 != 3:
            assert inbox.token_ids == expected
        assert inbox.finish
    assert scheduler.pool.num_used == 0
    with pytest.raises(QueueFullError, match="stopping"):
        submit(loop, [1])


def test_stop_without_patience_cancels_what_runs() -> None:
    class Slow(FakeModel):
        def forward(self, batch: Any, cache: Any) -> Any:
            started.set()
            release.wait(10)
            return super().forward(batch, cache)

    started, release = threading.Event(), threading.Event()
    loop, _, _ = fake_loop(Slow(64, 4))
    loop.start()
    inboxes = [submit(loop, [1], str(number)) for number in range(6)]
    started.wait(10)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    release.set()
    stopper.join(10)

    assert not stopper.is_alive()
    assert {inbox.finish.reason for inbox in inboxes} == {FinishReason.CANCELLED}


def test_a_stopped_loop_can_be_started_again() -> None:
    loop, _, _ = fake_loop()
    loop.start()
    loop.stop()
    loop.start()
    inbox = submit(loop, [1])
    loop.stop(timeout_s=10.0)

    assert inbox.token_ids == greedy_reference([1], 10)


def test_stats_count_what_happened() -> None:
    loop, _, _ = fake_loop()
    submit(loop, [1] * 10, "a", ignore_eos=True)
    submit(loop, [2] * 5, "b", ignore_eos=True, max_tokens=3)
    submit(loop, [3] * 5, "c")
    loop.cancel("c")
    loop.step()

    assert loop.stats().num_running == 2
    assert 0 < loop.stats().kv_usage < 1
    run(loop)
    stats = loop.stats()
    assert stats.num_prompt_tokens == 15
    assert stats.num_generation_tokens == 13
    assert dict(stats.finished) == {"stop": 0, "length": 2, "cancelled": 1, "error": 0}
    assert stats.num_cancelled == 1
    assert stats.kv_usage == 0
    assert stats.max_step_seqs == 2
    assert stats.num_step_tokens == 15 + 9 + 2
