"""Streams on the wire: framing, order, equality with the unstreamed answer, and clients that go away."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from pocketllm.engine.lifecycle.request import FinishReason, Request
from tests.served.conftest import Served, http_request, until
from tests.served.scripted import END, ScriptedEngine, held_back, slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def http_chunks(connection: socket.socket) -> list[bytes]:
    """The chunks of a chunked response, as the server wrote them."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return [chunk for chunk in chunks if chunk]


def test_every_event_is_one_write_and_one_whole_json_document(module_server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "né\u2028 \u0085x"}], "stream": True}
    with module_server.raw(http_request(CHAT, body, close=True)) as connection:
        chunks = http_chunks(connection)

    assert chunks[-1] == b"data: [DONE]\n\n"
    for chunk in chunks[:-1]:
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n") == 2
        assert chunk.isascii()
        assert json.loads(chunk[6:])["object"] == "chat.completion.chunk"
    text = "".join(json.loads(chunk[6:])["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == "user: né\u2028 \u0085x\n"


def test_a_chat_stream_opens_with_the_role_and_closes_with_an_empty_delta(module_server: Served) -> None:
    chunks = module_server.stream(CHAT, messages=HELLO, max_tokens=5)
    choices = [chunk["choices"][0] for chunk in chunks]

    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "user:"
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_completion_stream_has_the_finish_reason_in_one_last_empty_chunk(module_server: Served) -> None:
    choices = [chunk["choices"][0] for chunk in module_server.stream(COMPLETIONS, prompt="abc")]

    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a", None),
        ("b", None),
        ("c", None),
        ("", "stop"),
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_has_exactly_one_finish_reason(module_server: Served, n: int) -> None:
    chunks = module_server.stream(CHAT, messages=HELLO, n=n)
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]

    assert sorted(ends) == list(range(n))


def test_usage_comes_in_one_chunk_without_choices_when_asked_for(module_server: Served) -> None:
    chunks = module_server.stream(CHAT, messages=HELLO, n=2, stream_options={"include_usage": True})

    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == module_server.chat("hello", n=2)["usage"]


ANSWERS = ["plain", "né — €", "日本語のテキスト", "👩‍👩‍👧 done", "a\u2028b", " ", "mixed é 日 👍 end"]


@pytest.mark.parametrize("text", ANSWERS)
def test_streamed_and_whole_answers_agree_byte_for_byte(module_server: Served, text: str) -> None:
    asked = {"prompt": text, "max_tokens": 100, "logprobs": 2, "return_token_ids": True}
    whole = module_server.complete(**asked)["choices"][0]
    choices = [chunk["choices"][0] for chunk in module_server.stream(COMPLETIONS, **asked)]

    assert "".join(choice["text"] for choice in choices) == whole["text"] == text
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["token_ids"]
    assert whole["token_ids"] == list(text.encode())
    assert [choice.get("prompt_token_ids") for choice in choices] == [whole["prompt_token_ids"]] + [None] * (
        len(choices) - 1
    )
    for key in whole["logprobs"]:
        streamed = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][key]]
        assert streamed == whole["logprobs"][key]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("text", ANSWERS)
def test_chat_logprobs_carry_exact_bytes_while_characters_are_held_back(module_server: Served, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3}
    whole = module_server.post(CHAT, **asked).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in module_server.stream(CHAT, **asked)]
    entries = whole["logprobs"]["content"]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]

    assert streamed == entries
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == whole["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all(top["token"] for entry in entries for top in entry["top_logprobs"])


def test_a_token_that_is_part_of_a_character_is_spelled_as_bytes(module_server: Served) -> None:
    chat = module_server.chat("é", logprobs=True)["choices"][0]["logprobs"]["content"]
    plain = module_server.complete("é", logprobs=0)["choices"][0]["logprobs"]

    assert [(entry["token"], entry["bytes"]) for entry in chat[6:8]] == [("\\xc3", [0xC3]), ("\\xa9", [0xA9])]
    assert plain["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_text_offsets_count_characters(module_server: Served) -> None:
    found = module_server.complete("a日b👍c", logprobs=1, max_tokens=100)["choices"][0]["logprobs"]["text_offset"]

    assert found == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]


def test_a_control_token_has_a_name_but_no_bytes(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = lambda request: iter([(97, "a"), (END, "")])
    entries = serve(engine).chat("x", logprobs=True)["choices"][0]["logprobs"]["content"]

    assert [(entry["token"], entry["bytes"]) for entry in entries] == [("a", [97]), ("<end>", None)]


def test_token_ids_stand_beside_every_logprob_when_asked_for(module_server: Served) -> None:
    chat = module_server.chat("x", logprobs=True, top_logprobs=2, return_token_ids=True)["choices"][0]
    plain = module_server.complete("x", logprobs=2, return_token_ids=True)["choices"][0]

    for entry in (*chat["logprobs"]["content"], *plain["logprobs"]["content"]):
        assert entry["bytes"] == [entry["token_id"]]
        assert [top["token_id"] for top in entry["top_logprobs"]] == [entry["token_id"], entry["token_id"] + 1]
    assert chat["prompt_token_ids"] == list(b"user: x\n")


def test_alternatives_hold_the_chosen_token_too(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine())

    assert server.complete("a", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]
    assert server.complete("a", logprobs=2)["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


def broken_after(count: int) -> Callable[[Request], Iterable[Any]]:
    """A script that fails after some tokens, with words that no client should read."""

    def script(request: Request) -> Iterable[Any]:
        yield from [(120, "x")] * count
        yield "RuntimeError in /home/somebody/secret.py"

    return script


def test_an_engine_failure_is_told_in_band_once_a_stream_has_begun(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = broken_after(2)
    server = serve(engine)
    chunks = server.stream(COMPLETIONS, prompt="a")

    assert [set(chunk) == {"error"} for chunk in chunks] == [False, False, True]
    assert "secret" not in json.dumps(chunks)
    response = server.post(COMPLETIONS, prompt="a")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert "secret" not in response.text
    until(lambda: server.state.in_flight == set())


def test_one_failed_choice_ends_its_neighbors(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = lambda request: (
        broken_after(1)(request) if request.request_id.endswith("-1") else slow(0.002)(request)
    )
    server = serve(engine)
    server.post(COMPLETIONS, prompt="a", n=3, max_tokens=4000)

    until(lambda: not engine.loop.active)
    assert len(engine.loop.cancelled) == 2


def test_tokens_arrive_as_they_are_made(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.05)
    server = serve(engine)
    with server.raw(http_request(COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 4000})) as connection:
        seen = b""
        while seen.count(b'"text":"x"') < 3:
            seen += connection.recv(65536)

        assert len(engine.loop.active) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_leaves_a_stream_ends_its_requests(serve: Callable[..., Served], path: str) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.002)
    server = serve(engine)
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    connection = server.raw(http_request(path, {**body, "stream": True, "n": 3, "max_tokens": 4000}))
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    until(lambda: len(engine.loop.active) == 3)
    connection.close()

    until(lambda: not engine.loop.active, 5)
    until(lambda: server.state.in_flight == set(), 5)
    assert server.metric("cancellations_total") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    serve: Callable[..., Served], stream: bool
) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(4)  # as in a long prefill
    server = serve(engine)
    connection = server.raw(http_request(COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": stream}))
    until(lambda: len(engine.loop.active) == 1)
    connection.close()

    until(lambda: len(engine.loop.cancelled) == 1, 3.5)
    until(lambda: server.state.in_flight == set(), 5)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    module_server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    whole = http_request(COMPLETIONS, {"prompt": "a" * 1000})
    for size in (40, len(whole) // 2, len(whole) - 1):
        module_server.raw(whole[:size]).close()

    assert module_server.complete("a")["choices"][0]["text"] == "a"
    assert caplog.records == []


def test_fifty_rounds_of_leaving_and_asking_again_leave_nothing_behind(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    server = serve(engine)
    num_threads = threading.active_count()
    for number in range(50):
        engine.loop.script = slow(0.001)
        is_stream = number % 2 == 0
        connection = server.raw(http_request(COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": is_stream}))
        until(lambda: len(engine.loop.active) == 1)
        if is_stream:
            connection.recv(100)
        connection.close()
        until(lambda: not engine.loop.active, 5)
        engine.loop.script = ScriptedEngine().loop.script
        assert server.complete(f"round {number}")["choices"][0]["text"] == f"round {number}"

    until(lambda: server.state.in_flight == set())
    until(lambda: threading.active_count() <= num_threads + 1)
    assert server.metric("cancellations_total") == 50


def test_a_client_that_reads_slowly_gets_everything_and_holds_up_nobody(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    server = serve(engine)
    text = "é" * 1500
    with server.raw(
        http_request(COMPLETIONS, {"prompt": text, "max_tokens": 4000 - 3000, "stream": True}, close=True)
    ) as connection:
        time.sleep(0.1)
        assert server.complete("quick")["choices"][0]["text"] == "quick"
        chunks = http_chunks(connection)

    assert "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks[:-1]) == text[:500]


def test_sixteen_streams_at_once_all_finish_with_their_own_text(module_server: Served) -> None:
    texts = [f"stream number {number} " * 3 for number in range(16)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        with httpx.Client(base_url=module_server.url, trust_env=False, timeout=30) as client:
            body = {"prompt": texts[number], "max_tokens": 200, "stream": True}
            lines = client.post(COMPLETIONS, json=body).text.split("\n\n")
            answers[number] = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [answers[number] for number in range(16)] == texts


def test_the_scripted_text_is_released_only_at_character_ends() -> None:
    assert held_back("é!".encode()) == ["", "é", "!"]


def test_a_cancelled_request_tells_its_reader(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = lambda request: iter([(120, "x"), FinishReason.CANCELLED])
    server = serve(engine)

    assert server.stream(COMPLETIONS, prompt="a")[-1]["error"]["code"] == "cancelled"
    assert server.post(COMPLETIONS, prompt="a").status_code == 503
