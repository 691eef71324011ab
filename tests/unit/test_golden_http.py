"""What is read from an HTTP answer, and the two endings, against scripted servers and clients."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.golden.compare import Identical, NotJudged, Observed, Regression
from pocketllm.golden.entry_points.answers import SchemaError, StreamReader, read_whole
from pocketllm.golden.entry_points.http import HttpClient, parse_metrics, served_model
from pocketllm.golden.judging.endings import RUNNING, WAITING, check_cancel, check_shutdown
from tests.unit.test_golden_compare import SERVED
from tests.unit.test_golden_fixture import ANSWER, CHAT

COMPLETION = replace(CHAT, kind="completion", messages=(), prompt="Once upon", template_sha256=None)


def chunk(delta: dict[str, Any] | None = None, finish: Any = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish, **choice}]}


STREAM = [
    chunk({"role": "assistant", "content": ""}, token_ids=[], prompt_token_ids=[1, 2]),
    chunk({"content": "Par"}, token_ids=[5]),
    chunk({"content": "is"}, token_ids=[6, 7]),
    chunk(finish="stop", token_ids=[]),
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
]


def read(*chunks: dict[str, Any] | str) -> Observed:
    reader = StreamReader()
    for item in chunks:
        reader.push(item if isinstance(item, str) else json.dumps(item))
    return reader.finish()


def test_a_stream_is_put_together_again() -> None:
    assert read(*STREAM, "[DONE]") == Observed(
        prompt_token_ids=(1, 2),
        token_ids=(5, 6, 7),
        text="Paris",
        finish_reason="stop",
        num_prompt_tokens=2,
        num_output_tokens=3,
    )


def test_only_a_chunk_with_a_token_counts_as_the_first_token() -> None:
    reader = StreamReader()

    assert [reader.push(json.dumps(item)) for item in STREAM] == [False, True, True, False, False]


@pytest.mark.parametrize(
    "chunks",
    [
        STREAM,
        [*STREAM, "[DONE]", STREAM[1]],
        [*STREAM, chunk(finish="length"), "[DONE]"],
        [{"error": {"message": "out of memory"}}, "[DONE]"],
        ["{half", "[DONE]"],
        ["[1]", "[DONE]"],
        [{"choices": "x"}, "[DONE]"],
        [{"choices": 7}, "[DONE]"],
        [{"choices": [{"delta": 7}]}, "[DONE]"],
        [chunk({"content": 7}), "[DONE]"],
        [chunk(finish={"a": 1}), "[DONE]"],
        [chunk(token_ids=["x"]), "[DONE]"],
        [chunk(token_ids=7), "[DONE]"],
        [chunk(logprobs={"content": [7]}), "[DONE]"],
        [{"choices": [], "usage": "x"}, "[DONE]"],
        [{"choices": [], "usage": {"prompt_tokens": "2"}}, "[DONE]"],
        [{"choices": [], "usage": {"prompt_tokens_details": [1]}}, "[DONE]"],
    ],
)
def test_a_malformed_stream_is_a_schema_error(chunks: list[Any]) -> None:
    with pytest.raises(SchemaError):
        read(*chunks)


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"message": None}]}, {"choices": [3]}, {"choices": [{"text": 7}]}]
)
def test_a_malformed_answer_is_a_schema_error(body: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        read_whole(body)


def test_a_foreign_answer_has_text_and_no_ids() -> None:
    observed = read_whole({"choices": [{"text": "Paris", "finish_reason": "stop"}]})

    assert (observed.text, observed.token_ids, observed.num_prompt_tokens) == ("Paris", None, None)


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP x y\nx{model="a"} 1.0\nx{model="b"} 2.0\ny 0.5\n'

    assert parse_metrics(text) == {"x": 3.0, "y": 0.5}


# -- logprobs ----------------------------------------------------------------------------------------------------------
def chat_logprobs(*entries: tuple[int | None, float]) -> dict[str, Any]:
    """As a chat choice has them; `id` is what llama-server calls a token's id."""
    known = [({} if one is None else {"id": one}) | {"token": "x", "logprob": value} for one, value in entries]
    return {"content": [{**entry, "top_logprobs": [entry]} for entry in known]}


def test_logprobs_are_read_whole_and_streamed() -> None:
    choice = {"message": {"content": "Paris"}, "finish_reason": "stop", "logprobs": chat_logprobs((5, -0.1), (6, -0.2))}
    streamed = [
        chunk({"content": "Par"}, logprobs=chat_logprobs((5, -0.1))),
        chunk({"content": "is"}, finish="stop", logprobs=chat_logprobs((6, -0.2))),
    ]

    for observed in (read_whole({"choices": [choice]}), read(*streamed, "[DONE]")):
        assert (observed.token_ids, observed.logprobs) == ((5, 6), (-0.1, -0.2))
        assert observed.tops == (((5, -0.1),), ((6, -0.2),))


def test_logprobs_of_other_tokens_than_the_answers_are_none() -> None:
    choice = {"text": "Paris", "finish_reason": "stop", "token_ids": [5, 6, 7]}

    observed = read_whole({"choices": [{**choice, "logprobs": {"token_logprobs": [-0.1]}}]})

    assert (observed.token_ids, observed.logprobs, observed.tops) == ((5, 6, 7), None, None)


def test_logprobs_without_ids_leave_the_ids_unknown() -> None:
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "logprobs": chat_logprobs((None, -0.1))}

    observed = read_whole({"choices": [choice]})

    assert (observed.token_ids, observed.logprobs, observed.tops) == (None, (-0.1,), None)


def test_cached_tokens_are_read_from_the_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}

    observed = read_whole({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage})

    assert observed.num_cached_tokens == 8


@pytest.mark.parametrize(
    ("knows", "expected"), [("prompt_logprobs", (-0.2, -0.3)), ("echo", (-0.2, -0.3)), ("nothing", None)]
)
def test_an_answer_is_scored_by_what_a_server_knows(knows: str, expected: Any) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        assert body["prompt"] == [1, 2, 3, 4]
        if knows not in body:
            return 400, b'{"error": {"message": "not supported"}}'
        rows = [None, *({str(one): {"logprob": -0.1 * (one - 1)}} for one in (2, 3, 4))]
        if knows == "prompt_logprobs":
            return 200, json.dumps({"choices": [{"text": "", "prompt_logprobs": rows}]}).encode()
        values = [None, -0.1, -0.2, -0.3, -9.0]
        return 200, json.dumps({"choices": [{"text": "", "logprobs": {"token_logprobs": values}}]}).encode()

    with scripted_server(answer) as url:
        client = HttpClient(url, "m")
        found = client.score([1, 2], [3, 4])
        client.close()

    assert found is None if expected is None else found == pytest.approx(expected)


def test_going_on_asks_for_token_ids_without_the_stop_strings() -> None:
    seen = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        seen.append((path, body))
        return 200, whole(body)

    with scripted_server(answer) as url:
        client = HttpClient(url, "m")
        client.resume(CHAT, (1, 2, 3), 5)
        client.close()

    [(path, body)] = seen
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [1, 2, 3], 5)
    assert "stop" not in body


# -- over a socket -----------------------------------------------------------------------------------------------------
@contextmanager
def scripted_server(answer: Callable[[str, dict[str, Any]], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.reply(*answer(self.path, body))

        def do_GET(self) -> None:
            self.reply(*answer(self.path, {}))

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def whole(body: dict[str, Any]) -> bytes:
    ids = {"token_ids": [5, 6, 7], "prompt_token_ids": [1, 2]} if body.get("return_token_ids") else {}
    text = {"message": {"role": "assistant", "content": "Paris"}} if "messages" in body else {"text": "Paris"}
    return json.dumps({"choices": [{**text, "finish_reason": "stop", **ids}]}).encode()


def test_a_case_is_sent_as_its_own_kind_with_its_own_sampling() -> None:
    seen = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        seen.append((path, body))
        return 200, whole(body)

    with scripted_server(answer) as url:
        client = HttpClient(url + "/v1", "m")
        observed = [client.answer(CHAT), client.answer(COMPLETION)]
        client.close()

    assert [item.token_ids for item in observed] == [(5, 6, 7)] * 2
    assert [path for path, _ in seen] == ["/v1/chat/completions", "/v1/completions"]
    assert seen[0][1]["messages"] == [dict(message) for message in CHAT.messages]
    assert seen[1][1]["prompt"] == "Once upon"
    assert all(body["max_tokens"] == 8 and body["stop"] == ["\n\n"] and body["stream"] is False for _, body in seen)


def test_a_server_that_refuses_our_extensions_is_asked_without_them() -> None:
    def strict(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        refused = [name for name in ("return_token_ids", "logprobs") if name in body]
        if refused:
            return 400, json.dumps({"error": {"message": f"unknown field {refused[0]}"}}).encode()
        return 200, whole(body)

    with scripted_server(strict) as url:
        client = HttpClient(url, "m")
        observed = client.answer(CHAT)
        client.close()

    assert (observed.status, observed.text, observed.token_ids) == (200, "Paris", None)


def test_a_refusal_keeps_the_servers_words() -> None:
    with scripted_server(lambda path, body: (400, b'{"error": {"message": "too long", "code": "x"}}')) as url:
        client = HttpClient(url, "m")
        observed = [client.answer(CHAT), client.answer(CHAT, is_stream=True)]
        client.close()

    assert [(item.status, item.error) for item in observed] == [(400, "too long")] * 2


def test_a_refusal_that_is_no_utf_8_is_told_all_the_same() -> None:
    with scripted_server(lambda path, body: (502, "Passerelle indisponible, réessayez".encode("latin-1"))) as url:
        client = HttpClient(url, "m")
        observed = [client.answer(CHAT), client.answer(CHAT, is_stream=True)]
        client.close()

    assert [(item.status, item.error) for item in observed] == [(502, "Passerelle indisponible, r\ufffdessayez")] * 2


def test_a_server_that_is_not_there_is_not_judged() -> None:
    with scripted_server(lambda path, body: (200, b"")) as url:
        pass

    with pytest.raises(NotJudgedError):
        HttpClient(url, "m").answer(CHAT)
    with pytest.raises(NotJudgedError):
        served_model(url)


def test_a_server_that_wants_a_key_says_so_instead_of_listing_its_models() -> None:
    body = b'{"error": {"message": "no key"}}'
    with scripted_server(lambda path, asked: (401, body)) as url, pytest.raises(NotJudgedError, match=r"401: no key"):
        served_model(url)


def test_one_of_several_served_models_must_be_named() -> None:
    listed = [b'{"data": [{"id": "a"}, {"id": "b"}]}', b'{"data": [{"id": "org/a"}]}']
    with scripted_server(lambda path, body: (200, listed.pop(0))) as url:
        with pytest.raises(OptionError, match="--served-model"):
            served_model(url)
        assert served_model(url + "/v1/") == "org/a"


# -- endings -----------------------------------------------------------------------------------------------------------
KV = "pocketllm:kv_cache_usage_perc"
IDLE = {RUNNING: 0.0, WAITING: 0.0, KV: 0.0, "pocketllm:generation_tokens_total": 0.0}
BUSY = {**IDLE, RUNNING: 1.0, KV: 0.25}


class ScriptedClient:
    """Plays metrics in order, the last one for ever."""

    def __init__(self, *metrics: dict[str, float], served: Observed = SERVED, opened: Observed = Observed()) -> None:  # noqa: B008
        self._metrics = list(metrics)
        self._served, self._opened = served, opened
        self.is_first_told = False

    def metrics(self) -> dict[str, float]:
        return self._metrics.pop(0) if len(self._metrics) > 1 else self._metrics[0]

    def abandon(self, case: Any, num_chunks: int, meanwhile: Callable[[], None], **overrides: Any) -> Observed:
        if self._opened.status == 200:
            meanwhile()
        return self._opened

    def answer(self, case: Any, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        if on_first:
            on_first()
        return self._served

    def resume(self, case: Any, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        raise NotJudgedError("nobody goes on here")


def cancel(*metrics: dict[str, float], **options: Any) -> Any:
    return check_cancel(ScriptedClient(*metrics, **options), CHAT, ANSWER)  # type: ignore[arg-type]  # a stand-in


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.golden.judging.endings.FREED_WITHIN_S", 0.1)


def test_a_cancelled_request_that_gives_its_blocks_back_passes() -> None:
    assert cancel(IDLE, BUSY, BUSY, IDLE) == Identical()


@pytest.mark.parametrize(
    "after",
    [BUSY, {**IDLE, KV: 0.25}, {**IDLE, WAITING: 1.0}, {**IDLE, "pocketllm:generation_tokens_total": 5000.0}],
    ids=["still running", "blocks kept", "waiting", "ran to its end"],
)
def test_a_cancelled_request_that_goes_on_or_keeps_its_blocks_is_a_regression(after: dict[str, float]) -> None:
    outcome = cancel(IDLE, BUSY, after)

    assert isinstance(outcome, Regression)
    assert outcome.what == "cancel"


def test_a_wrong_answer_after_a_cancelled_request_is_a_regression() -> None:
    outcome = cancel(IDLE, BUSY, IDLE, served=replace(SERVED, token_ids=(5, 8, 7)))

    assert isinstance(outcome, Regression)
    assert (outcome.what, outcome.position) == ("after a cancelled request, tokens", 1)


@pytest.mark.parametrize("metrics", [(BUSY,), (IDLE, IDLE), ({"up": 1.0},)], ids=["others", "too fast", "no series"])
def test_a_cancel_that_cannot_be_seen_is_not_judged(metrics: tuple[dict[str, float], ...]) -> None:
    assert isinstance(cancel(*metrics), NotJudged)


def test_a_refused_request_cannot_be_cancelled_and_is_not_judged() -> None:
    assert isinstance(cancel(IDLE, BUSY, IDLE, opened=Observed(status=400, error="no")), NotJudged)


class ScriptedServer:
    def __init__(self, code: int | None = 0) -> None:
        self._code = code
        self.exit_code: int | None = None
        self.is_terminated = False

    def terminate(self) -> None:
        self.is_terminated = True

    def wait(self, timeout_s: float) -> int | None:
        return self._code if self.is_terminated else None


def shutdown(code: int | None, served: Observed = SERVED) -> Any:
    client = ScriptedClient(IDLE, served=served)
    return check_shutdown(ScriptedServer(code), client, CHAT, ANSWER, timeout_s=0)  # type: ignore[arg-type]  # stand-ins


def test_a_server_that_drains_and_ends_with_0_passes() -> None:
    assert shutdown(0) == Identical()


@pytest.mark.parametrize("code", [1, -15, None])
def test_a_server_that_ends_otherwise_or_not_at_all_is_a_regression(code: int | None) -> None:
    assert isinstance(shutdown(code), Regression)


def test_a_server_that_has_ended_already_is_not_judged() -> None:
    server = ScriptedServer()
    server.exit_code = -9
    client: Any = ScriptedClient(IDLE)

    assert isinstance(check_shutdown(server, client, CHAT, ANSWER, timeout_s=0), NotJudged)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def test_a_server_that_cuts_the_running_answer_is_a_regression() -> None:
    assert isinstance(shutdown(0, replace(SERVED, text="Pa", token_ids=(5,))), Regression)
    assert isinstance(shutdown(0, Observed(error="the stream ended without [DONE]")), Regression)
