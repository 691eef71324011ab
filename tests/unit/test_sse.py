"""Streams without sockets: chunks from events, in every order that events can come."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.request import (
    Event,
    FinishEvent,
    FinishReason,
    Request,
    RequestTimes,
    TokenEvent,
    TokenLogprobs,
)
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.serving.answers.logprobs import OffsetCounter, Speller, completion_logprobs, report
from pocketllm.engine.serving.failures import crash
from pocketllm.engine.serving.prompts import Choice
from pocketllm.engine.serving.protocol import ChatBody, CompletionBody, GenerationBody, validate
from pocketllm.engine.serving.stream import DONE, Reply, as_event, collect, event_bytes


class ByteTokenizer:
    vocab_size = 256
    strips_first_space = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_rendered = encode

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id == 0


class Scripted:
    """A generation whose events are known beforehand."""

    def __init__(self, events: list[tuple[int, Event]], num_choices: int) -> None:
        self.id = "id"
        self.choices = [Choice(index, (7, 8), SamplingParams()) for index in range(num_choices)]
        self.requests = [Request("r", choice.prompt_token_ids, choice.params) for choice in self.choices]
        self.is_abandoned = False
        self._events = events

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        for item in self._events:
            yield item


def token(token_id: int, text: str, with_logprobs: bool = True) -> TokenEvent:
    logprobs = TokenLogprobs(-1.0, (token_id, 65), (-1.0, -2.0)) if with_logprobs else None
    return TokenEvent("r", token_id, text, logprobs, 0.0)


def finish(text: str = "", reason: FinishReason = FinishReason.STOP, count: int = 0) -> FinishEvent:
    return FinishEvent(
        "r", reason, text, 2, count, 1, RequestTimes(), 0, "a secret" if reason.value == "error" else None
    )


def body_for(is_chat: bool, **fields: Any) -> GenerationBody:
    if is_chat:
        return validate(ChatBody, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, **fields})
    return validate(CompletionBody, {"prompt": "x", "logprobs": 1, **fields})


def reply_for(body: GenerationBody, generation: Any) -> Reply:
    return Reply(generation, body, "m", Speller(ByteTokenizer(), "" if isinstance(body, ChatBody) else "bytes:"))


def streamed(events: list[tuple[int, Event]], body: GenerationBody, num_choices: int) -> list[bytes]:
    async def read() -> list[bytes]:
        generation: Any = Scripted(events, num_choices)
        stream = event_bytes(generation, reply_for(body, generation), lambda error: crash("id", error))
        return [event async for event in stream]

    return asyncio.run(read())


def documents(stream: list[bytes]) -> list[dict[str, Any]]:
    assert stream[-1] == DONE
    return [json.loads(event.removeprefix(b"data: ")) for event in stream[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


ANSWER = st.lists(st.tuples(st.integers(0, 255), st.text(max_size=3)), max_size=6)


@given(answers=st.lists(ANSWER, min_size=1, max_size=3), tails=st.data(), is_chat=st.booleans(), with_ids=st.booleans())
def test_a_stream_adds_up_to_the_whole_answer_however_choices_interleave(
    answers: list[list[tuple[int, str]]], tails: st.DataObject, is_chat: bool, with_ids: bool
) -> None:
    queues = [[token(*item) for item in answer] for answer in answers]
    ends = [finish(tails.draw(st.text(max_size=2)), count=len(queue)) for queue in queues]
    pending = [[*queue, end] for queue, end in zip(queues, ends, strict=True)]
    events: list[tuple[int, Event]] = []
    while any(pending):
        index = tails.draw(st.sampled_from([number for number, queue in enumerate(pending) if queue]))
        events.append((index, pending[index].pop(0)))
    body = body_for(is_chat, n=len(answers), return_token_ids=with_ids)
    generation: Any = Scripted(events, len(answers))
    whole = asyncio.run(collect(generation, reply_for(body, generation)))
    chunks = documents(streamed(events, body, len(answers)))

    for expected in whole["choices"]:
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert "".join(map(text_of, mine)) == (expected["message"]["content"] if is_chat else expected["text"])
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert text_of(mine[-1]) == ""
        key = "content" if is_chat else "tokens"
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"][key]]
        assert entries == (expected["logprobs"][key] if expected["logprobs"] else [])
        if is_chat:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        if with_ids:
            assert [one for choice in mine for one in choice["token_ids"]] == expected["token_ids"]
            assert [choice.get("prompt_token_ids") for choice in mine] == [[7, 8]] + [None] * (len(mine) - 1)


@given(document=st.dictionaries(st.text(), st.text()))
def test_an_event_is_one_ascii_line_whatever_it_holds(document: dict[str, str]) -> None:
    event = as_event(document)

    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.isascii()
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event[6:]) == document


def test_text_that_is_held_back_makes_no_chunk_unless_something_rides_on_it() -> None:
    events: list[tuple[int, Event]] = [(0, token(0xC3, "", False)), (0, token(0xA9, "é", False)), (0, finish())]
    plain = body_for(False, logprobs=None)

    assert len(documents(streamed(events, plain, 1))) == 2
    assert len(documents(streamed(events, body_for(False, logprobs=None, return_token_ids=True), 1))) == 3


def test_what_was_held_back_comes_before_the_finish_chunk() -> None:
    choices = [chunk["choices"][0] for chunk in documents(streamed([(0, finish("tail"))], body_for(True), 1))]

    assert [(text_of(choice), choice["finish_reason"]) for choice in choices] == [
        ("", None),
        ("tail", None),
        ("", "stop"),
    ]


@pytest.mark.parametrize(
    ("reason", "code"), [(FinishReason.ERROR, "engine_error"), (FinishReason.CANCELLED, "cancelled")]
)
def test_an_end_by_the_engine_is_told_in_band_and_the_stream_still_closes(reason: FinishReason, code: str) -> None:
    events: list[tuple[int, Event]] = [(0, token(65, "A")), (0, finish("", reason))]
    chunks = documents(streamed(events, body_for(True), 1))

    assert chunks[-1]["error"]["code"] == code
    assert "secret" not in json.dumps(chunks)
    assert not any(chunk.get("choices", [{}])[0].get("finish_reason") for chunk in chunks[:-1])


def test_a_bug_in_the_middle_is_told_in_band_too() -> None:
    bad: Any = SimpleNamespace(text="x", token_id=None, logprobs=SimpleNamespace())
    chunks = documents(streamed([(0, token(65, "A")), (0, bad)], body_for(False), 1))

    assert chunks[-1]["error"]["type"] == "server_error"
    assert "Traceback" not in json.dumps(chunks)


@given(text=st.text(max_size=20))
def test_offsets_count_the_characters_completed_before_each_token(text: str) -> None:
    counter, data = OffsetCounter(), text.encode()
    offsets = [counter.advance(bytes([byte])) for byte in data]

    assert offsets == [len(data[:position].decode(errors="ignore")) for position in range(len(data))]


def test_two_tokens_with_one_spelling_keep_the_likelier() -> None:
    class Twins(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"same"

    reports = [report(1, TokenLogprobs(-3.0, (2, 1), (-0.1, -3.0)), 0)]
    found = completion_logprobs(reports, Speller(Twins()), with_ids=True)

    assert found["top_logprobs"] == [{"same": -0.1}]
    assert [(entry["token_id"], entry["logprob"]) for entry in found["content"][0]["top_logprobs"]] == [
        (2, -0.1),
        (1, -3.0),
    ]


def test_minus_infinity_is_a_number_json_has() -> None:
    assert report(1, TokenLogprobs(float("-inf"), (2,), (float("-inf"),)), 0).top == ((2, -9999.0),)
