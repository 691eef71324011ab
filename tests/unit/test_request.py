import itertools

import pytest

from pocketllm.engine.lifecycle.request import NEXT_STATES, Request, RequestState
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.errors import RequestError


def a_request(**changes: object) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(), **changes)  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(("start", "stop"), list(itertools.combinations(range(6), 2)))
def test_token_ids_run_over_prompt_and_output(start: int, stop: int) -> None:
    request = a_request(output_token_ids=[4, 5])

    assert request.token_ids(start, stop) == [1, 2, 3, 4, 5][start:stop]


def test_a_finished_request_never_moves_again() -> None:
    request = a_request()
    request.move_to(RequestState.FINISHED)

    for state in RequestState:
        with pytest.raises(AssertionError):
            request.move_to(state)


def test_every_state_has_its_successors_written_down() -> None:
    assert set(NEXT_STATES) == set(RequestState)
    assert all(state not in NEXT_STATES[state] for state in RequestState)


def test_a_request_without_a_seed_draws_a_fresh_one() -> None:
    assert a_request().seed != a_request().seed


def test_requests_are_told_apart_by_identity() -> None:
    assert a_request() != a_request()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        pytest.param("max_tokens", 10**4300 - 1, id="max_tokens-nines"),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        pytest.param("logprobs", -(10**5000), id="logprobs-huge"),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", ("x",) * 17),
        ("stop", ("\udcff",)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("max_tokens", 1.5),
        ("top_k", 2.0),
        ("seed", "1"),
        ("stop", (1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", (True,)),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # test data

    assert caught.value.param == field
    assert field.split("_")[0] in str(caught.value)


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]  # that is the point
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]  # kept as a tuple


def test_no_stop_may_be_said_as_none_and_a_number_is_no_list_of_stops() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]  # as clients say it
    with pytest.raises(RequestError, match="stop=5 is not a list"):
        SamplingParams(stop=5)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("top_k", [-1, 0, 1, 9_999_999])
def test_a_top_k_beyond_the_vocabulary_or_off_is_fine(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k
