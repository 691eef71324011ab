from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.scheduler import Schedule
from pocketllm.engine.lifecycle.steps.batch import build, build_ragged, build_singles


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_a_step_of_one_token_a_request_is_gathered_as_any_other(sizes: list[tuple[int, int, bool, bool]]) -> None:
    starts: dict[Request, int] = {}
    pending_ids: dict[Request, int] = {}
    for number, (num_tokens, more_blocks, is_pending, has_slot) in enumerate(sizes):
        request = Request(str(number), [100 * number + place for place in range(num_tokens)], SamplingParams())
        starts[request] = num_tokens - 1 + is_pending
        request.block_ids = [7 * number + block for block in range(starts[request] // 4 + 1 + more_blocks)]
        request.state_slot = number if has_slot else None
        pending_ids[request] = -1 - number
    ready = frozenset(request for number, request in enumerate(starts) if number % 2 == 0)
    schedule = Schedule(dict.fromkeys(starts, 1), starts, ready)

    one, other = build_singles(schedule, 4, pending_ids), build_ragged(schedule, 4, pending_ids)

    for field in fields(one):
        got, want = getattr(one, field.name), getattr(other, field.name)
        assert got.dtype == want.dtype, field.name
        np.testing.assert_array_equal(got, want, err_msg=field.name)


def test_a_backend_that_must_know_is_told_which_tokens_are_of_answers() -> None:
    prompts = [Request(str(number), [7] * 5, SamplingParams()) for number in range(3)]
    prompts[0].output_token_ids = [8]
    for request in prompts:
        request.block_ids = [0, 1]
    counts, starts = dict(zip(prompts, (1, 5, 1), strict=True)), dict(zip(prompts, (5, 0, 4), strict=True))
    schedule = Schedule(counts, starts, frozenset(prompts))

    assert build(schedule, 4, {}, tells_answers=True).answers.tolist() == [True, False, False]
    assert build(schedule, 4, {}).answers.size == 0
