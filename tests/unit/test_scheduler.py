from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.request import Request, RequestState
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Schedule, Scheduler
from pocketllm.errors import ContextLengthError, RequestError
from tests.fake_model import VOCAB_SIZE, limits


def a_scheduler(**changes: Any) -> Scheduler:
    """Without a prefix cache, so that equal prompts need as many blocks as different ones."""
    return Scheduler(limits(**{"prefix_cache": False, **changes}), VOCAB_SIZE)


def a_request(name: str, num_prompt: int, max_tokens: int | None = 4, **changes: Any) -> Request:
    return Request(name, [1] * num_prompt, SamplingParams(max_tokens=max_tokens), **changes)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.check(request)
        scheduler.add(request)


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step in which each request that catches up gets a token, and ends at its last."""
    schedule = scheduler.schedule()
    for request in scheduler.update(schedule):
        scheduler.append(request, 7)
        if len(request.output_token_ids) == request.max_output_tokens:
            scheduler.finish(request)
    return by_name(schedule)


def written_blocks(request: Request, count: int) -> list[int]:
    """Blocks that the next `count` tokens of a request go into."""
    first, last = request.num_computed_tokens, request.num_computed_tokens + count - 1
    return request.block_ids[first // 4 : last // 4 + 1]


def by_name(schedule: Schedule) -> dict[str, int]:
    return {request.request_id: count for request, count in schedule.num_tokens.items()}


# -- a step is a map request → number of tokens
def test_the_whole_admission_wave_is_one_step() -> None:
    scheduler = a_scheduler()
    add(scheduler, a_request("a", 3), a_request("b", 5), a_request("c", 2))

    assert step(scheduler) == {"a": 3, "b": 5, "c": 2}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_a_request_begins_after_the_one_that_scores_their_prompt() -> None:
    scheduler = a_scheduler(prefill_chunk=8)
    first = Request("a", [1] * 19, SamplingParams(max_tokens=3, prompt_logprobs=0))
    second = a_request("b", 19, scored_by=first)
    add(scheduler, first, second, a_request("c", 2))

    steps = [step(scheduler), step(scheduler)]
    first.prompt_logprobs += [None] * 19  # as the runner does
    steps.append(step(scheduler))

    assert steps == [{"a": 8}, {"a": 8}, {"a": 3, "b": 8, "c": 2}]
    assert second.prompt_logprobs is first.prompt_logprobs


def test_a_request_scores_itself_where_the_other_ended_halfway() -> None:
    scheduler = a_scheduler(prefill_chunk=8)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    first = Request("a", [1] * 19, params)
    second = Request("b", [1] * 19, params, scored_by=first)
    add(scheduler, first, second)
    scheduler.schedule()
    first.prompt_logprobs += [None] * 9
    scheduler.finish(first, is_sound=False)

    assert step(scheduler) == {"b": 8}
    assert second.is_scored
    assert second.prompt_logprobs == []


def test_a_request_does_not_wait_for_one_that_has_ended() -> None:
    scheduler = a_scheduler()
    first = Request("a", [1] * 5, SamplingParams(prompt_logprobs=0, max_tokens=1))
    add(scheduler, first, a_request("b", 5, scored_by=first))
    scheduler.schedule()
    scheduler.finish(first, is_sound=False)

    assert step(scheduler) == {"b": 5}


def test_a_long_prompt_is_cut_into_chunks() -> None:
    scheduler = a_scheduler(prefill_chunk=8)
    add(scheduler, a_request("a", 19))

    assert [step(scheduler) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 3}, {"a": 1}]


def test_decodes_go_on_beside_a_long_prefill() -> None:
    scheduler = a_scheduler(max_num_batched_tokens=8, prefill_chunk=8)
    add(scheduler, a_request("first", 1), a_request("long", 20), a_request("last", 1))

    assert step(scheduler) == {"first": 1, "long": 7}
    assert step(scheduler) == {"first": 1, "long": 7}
    assert step(scheduler) == {"first": 1, "long": 6, "last": 1}
    assert step(scheduler) == {"first": 1, "long": 1, "last": 1}


def test_the_width_is_never_exceeded() -> None:
    scheduler = a_scheduler(max_num_seqs=2)
    add(scheduler, *(a_request(name, 1) for name in "abc"))

    assert step(scheduler) == {"a": 1, "b": 1}


# -- first come, first served
def test_nobody_passes_the_head_of_the_line() -> None:
    scheduler = a_scheduler(num_blocks=8)
    add(scheduler, a_request("a", 8, 13), a_request("big", 24, 5), a_request("small", 1, 1))

    assert step(scheduler) == {"a": 8}
    assert [request.request_id for request in scheduler.waiting] == ["big", "small"]


def test_the_watermark_keeps_blocks_free_at_admission() -> None:
    scheduler = a_scheduler(num_blocks=8, watermark=0.25)
    add(scheduler, a_request("a", 16, 1), a_request("b", 12, 1))

    assert "b" not in step(scheduler)


def test_a_lone_request_is_admitted_whatever_watermark_and_reserve_say() -> None:
    scheduler = a_scheduler(num_blocks=8, watermark=1.0, reserve=1.0, prefill_chunk=64, max_num_batched_tokens=64)
    add(scheduler, a_request("a", 30, 3))

    assert step(scheduler) == {"a": 30}


@pytest.mark.parametrize(("reserve", "is_admitted"), [(1.0, False), (0.0, True)])
def test_the_reserve_keeps_room_for_growth(reserve: float, is_admitted: bool) -> None:
    scheduler = a_scheduler(num_blocks=8, reserve=reserve)
    add(scheduler, a_request("a", 4, 17), a_request("b", 4, 17))

    assert ("b" in step(scheduler)) is is_admitted


# -- preemption
def test_when_the_pool_is_dry_the_youngest_is_recomputed() -> None:
    scheduler = a_scheduler(num_blocks=5, reserve=0.0)
    old, young = a_request("old", 8, 8), a_request("young", 8, 8)
    add(scheduler, old, young)
    steps = []
    while scheduler.has_work:
        steps.append(step(scheduler))
        if young.num_preemptions and young.state is RequestState.WAITING:
            assert young.block_ids == []
            assert young.num_computed_tokens == 0

    assert young.num_preemptions == 1
    assert old.num_preemptions == 0
    assert scheduler.num_preemptions == 1
    assert len(young.output_token_ids) == 8
    assert scheduler.pool.num_free == 5


def test_with_a_full_reserve_nothing_is_ever_recomputed() -> None:
    scheduler = a_scheduler(num_blocks=7, reserve=1.0)
    add(scheduler, *(a_request(str(number), 5, 9) for number in range(12)))
    while scheduler.has_work:
        step(scheduler)

    assert scheduler.num_preemptions == 0


REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@example([(1, 17), (8, 10), (8, 10)], 3, 0, 1, 0.0, 0.0, 13, True)  # would take back at once what it preempted
@given(
    REQUESTS,
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(13, 30),
    st.booleans(),
)
def test_whatever_the_limits_everything_ends_and_in_order(
    sizes: list[tuple[int, int]],
    width: int,
    more_budget: int,
    chunk: int,
    watermark: float,
    reserve: float,
    num_blocks: int,
    prefix_cache: bool,
) -> None:
    scheduler = a_scheduler(
        prefix_cache=prefix_cache,
        max_num_seqs=width,
        max_num_batched_tokens=width + more_budget,
        prefill_chunk=chunk,
        watermark=watermark,
        reserve=reserve,
        num_blocks=num_blocks,
    )
    requests = [a_request(str(number), *size) for number, size in enumerate(sizes)]
    add(scheduler, *requests)
    admitted: list[str] = []
    for _ in range(5000):
        if not scheduler.has_work:
            break
        schedule = scheduler.schedule()

        assert schedule.num_tokens, "a step without work while work is left"
        assert schedule.total_tokens <= width + more_budget
        assert len(schedule.num_tokens) <= width
        assert all(1 <= count <= chunk for count in schedule.num_tokens.values())
        assert list(schedule.num_tokens) == scheduler.running
        assert not set(schedule.preempted) & set(schedule.num_tokens), "preempted only to be run at once"
        assert [int(request.request_id) for request in scheduler.waiting] == sorted(
            int(request.request_id) for request in scheduler.waiting
        )
        held = [block for request in requests for block in request.block_ids]
        assert len(set(held)) == scheduler.pool.num_used
        written = [block for request, count in schedule.num_tokens.items() for block in written_blocks(request, count)]
        assert all(held.count(block) == 1 for block in written), "a shared block is written"
        assert prefix_cache or len(set(held)) == len(held)
        admitted += [name for name in by_name(schedule) if name not in admitted]

        for request in scheduler.update(schedule):
            scheduler.append(request, 7)
            if len(request.output_token_ids) == request.max_output_tokens:
                scheduler.finish(request)

    assert {request.state for request in requests} == {RequestState.FINISHED}
    assert admitted == [request.request_id for request in requests], "somebody was overtaken"
    assert scheduler.pool.num_free == num_blocks
    if reserve == 1.0:
        assert scheduler.num_preemptions == 0


# -- refusals
def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        a_scheduler().check(a_request("a", 0))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40, True, 1.5, "1", None])
def test_a_token_id_outside_the_vocabulary_is_refused(token_id: Any) -> None:
    with pytest.raises(RequestError, match="token id"):
        a_scheduler().check(Request("a", [1, token_id], SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_stop_token_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match="stop_token_ids") as caught:
        a_scheduler().check(Request("a", [1], SamplingParams(max_tokens=1, stop_token_ids=(token_id,))))

    assert caught.value.param == "stop_token_ids"


def test_a_prompt_longer_than_the_context_is_refused_with_counts() -> None:
    with pytest.raises(ContextLengthError, match=r"64 tokens.*max_model_len=64.*by 1 tokens") as caught:
        a_scheduler().check(a_request("a", 64, None))

    assert caught.value.code == "context_length_exceeded"


def test_prompt_and_answer_beyond_the_context_are_refused_with_counts() -> None:
    with pytest.raises(ContextLengthError, match=r"60 tokens.*max_tokens=5.*65.*lower max_tokens to 4"):
        a_scheduler().check(a_request("a", 60, 5))


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    request = a_request("a", 60, None)
    a_scheduler().check(request)

    assert request.max_output_tokens == 4


def test_a_request_that_needs_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(ContextLengthError, match=r"20 tokens.*13.*cache holds 28"):
        a_scheduler(num_blocks=7).check(a_request("a", 20, 13))


def test_a_request_that_just_fits_the_pool_runs() -> None:
    scheduler = a_scheduler(num_blocks=8)
    add(scheduler, a_request("a", 20, 13))  # 32 tokens are computed: the last one drawn is not
    while scheduler.has_work:
        step(scheduler)

    assert scheduler.pool.num_free == 8


def test_scoring_may_fill_the_context_and_no_more() -> None:
    a_scheduler().check(a_request("a", 64, wants_prompt_logits=True))

    with pytest.raises(ContextLengthError, match="65 tokens"):
        a_scheduler().check(a_request("a", 65, wants_prompt_logits=True))


def test_scoring_refuses_what_would_not_fit_memory() -> None:
    scheduler = Scheduler(limits(max_model_len=8192), vocab_size=256_000)

    with pytest.raises(RequestError, match="at most 2097 tokens"):
        scheduler.check(a_request("a", 2098, wants_prompt_logits=True))
