"""Bodies of the OpenAI surface, without a server: strict, bounded, and every refusal names its field."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.serving.prompts import sampling_params
from pocketllm.engine.serving.protocol import (
    INERT,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    same,
    validate,
)
from pocketllm.engine.serving.transport.body import MAX_DEPTH, parse_object
from pocketllm.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(document=st.dictionaries(st.text(max_size=8), JSON, max_size=5))
def test_an_honest_object_comes_back_as_it_was(document: dict[str, Any]) -> None:
    assert parse_object(json.dumps(document).encode()) == document
    assert parse_object(json.dumps(document, ensure_ascii=False).encode()) == document


@given(data=st.binary(max_size=300))
def test_any_bytes_are_an_object_or_a_request_error(data: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(parse_object(data), dict)


@pytest.mark.parametrize("depth", [1, MAX_DEPTH, MAX_DEPTH + 1, 500, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    body = b'{"a":' * depth + b"1" + b"}" * depth
    if depth <= MAX_DEPTH:
        assert "a" in parse_object(body)
        return
    with pytest.raises(RequestError, match="deeper"):
        parse_object(body)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [Infinity]}', '{"a": {"b": -Infinity}}'])
def test_numbers_that_json_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a number"):
        parse_object(text.encode())


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDFFF": 1}', '{"a": ["x", {"b": "\\udc00\\ud800"}]}'])
def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_not(text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        parse_object(text.encode())

    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "😀", "b": "\\ud800"}


def completion(**fields: Any) -> CompletionBody:
    return validate(CompletionBody, {"prompt": "x", **fields})


@pytest.mark.parametrize("name", sorted(set(GenerationBody.model_fields) - {"stop", "stop_token_ids"}))
def test_null_is_the_default_of_every_field(name: str) -> None:
    assert completion(**{name: None}) == completion()
    assert sampling_params(completion(**{name: None}), 0) == sampling_params(completion(), 0)


@pytest.mark.parametrize("name", sorted(INERT))
def test_an_inert_field_takes_any_value(name: str) -> None:
    for value in (1, "x", {"deep": [1]}, None, True):
        assert sampling_params(completion(**{name: value}), 0) == sampling_params(completion(), 0)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_neutral_value_changes_nothing_and_any_other_is_refused(name: str) -> None:
    for value in (*NEUTRAL[name], None):
        assert sampling_params(completion(**{name: value}), 0) == sampling_params(completion(), 0)
    with pytest.raises(RequestError, match=name) as refused:
        completion(**{name: {"something": "else"}})
    assert refused.value.param == name


@given(name=st.text(min_size=1, max_size=30), value=JSON)
def test_an_unknown_field_with_a_value_is_refused_by_name(name: str, value: Any) -> None:
    known = {*CompletionBody.model_fields, *INERT, *NEUTRAL}
    if name in known or value is None:
        return
    with pytest.raises(RequestError, match="not supported"):
        completion(**{name: value})


def test_a_field_cannot_pose_as_a_part_of_the_model() -> None:
    for name in ("num_choices", "token_limit", "model_extra", "model_config", "check_whole", "__class__"):
        with pytest.raises(RequestError, match=name):
            completion(**{name: 1})


def test_a_boolean_is_never_a_number() -> None:
    assert not same(True, 1)
    assert not same(0, False)
    assert same(0.0, 0)
    assert same({"a": 1}, {"a": 1})


def test_developer_is_system_in_newer_words() -> None:
    newer = validate(Message, {"role": "developer", "content": "x"})

    assert newer.as_dict() == {"role": "system", "content": "x"}


def test_the_default_lengths_are_openais() -> None:
    chat = validate(ChatBody, {"messages": [{"role": "user", "content": "x"}]})

    assert completion().token_limit == 16
    assert chat.token_limit is None


@given(seed=st.integers(-(2**63), 2**64 - 1), offset=st.integers(0, 15))
def test_every_choice_has_a_valid_seed_of_its_own(seed: int, offset: int) -> None:
    body = completion(seed=seed, n=16)
    seeds = [sampling_params(body, number).seed for number in range(16)]

    assert len(set(seeds)) == 16
    assert seeds[0] == seed
    assert seeds[offset] == sampling_params(completion(seed=seed), offset).seed
