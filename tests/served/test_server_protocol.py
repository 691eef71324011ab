"""What a server says to good and bad bodies; every refusal has OpenAI's shape and leaves the server alive."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pocketllm
from pocketllm.engine.serving.protocol import ChatBody, CompletionBody
from pocketllm.errors import QueueFullError
from tests.served.conftest import Served, until
from tests.served.scripted import ScriptedEngine, slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    document = json.loads(response.content)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert str(Path(pocketllm.__file__).parents[1]) not in response.text
    assert str(Path.home()) not in response.text
    return document["error"]


def test_the_model_list_names_the_model_and_its_context(module_server: Served) -> None:
    listed = module_server.client.get("/v1/models").json()

    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [
        ("scripted", "model", 4096)
    ]
    assert module_server.client.get("/v1/models/scripted").json() == listed["data"][0]
    assert refusal(module_server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_a_model_name_may_hold_slashes_and_have_aliases(serve: Any) -> None:
    from pocketllm.engine.serving.settings import ServerSettings

    server = serve(ScriptedEngine(), ServerSettings(served_model_names=("org/model", "alias")))

    assert server.client.get("/v1/models/org/model").json()["id"] == "org/model"
    assert server.complete("a", model="alias")["model"] == "alias"
    assert server.complete("a")["model"] == "org/model"
    refused = refusal(server.post(COMPLETIONS, prompt="a", model="scripted"), 404)
    assert refused["message"] == "the model 'scripted' is not served here; served: org/model, alias"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..\\..", "/etc/passwd", "a\0b", "x" * 2**20, "", "Scripted", "gpt-4"]
)
def test_a_model_that_is_not_served_is_404_and_nothing_is_opened(
    module_server: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args))

    response = module_server.post(COMPLETIONS, prompt="a", model=name)

    assert refusal(response, 404)["code"] == "model_not_found"
    assert len(response.content) < 1000
    assert opened == []


def test_a_completion_has_the_openai_shape(module_server: Served) -> None:
    answer = module_server.complete("héllo", max_tokens=100)

    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "héllo", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_completion_has_the_openai_shape(module_server: Served) -> None:
    answer = module_server.chat("hello")

    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "user: hello\n", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_text_parts_read_like_the_text_itself(module_server: Served) -> None:
    part = {"type": "text", "text": "hello"}

    assert module_server.chat([part])["choices"] == module_server.chat("hello")["choices"]
    assert module_server.chat([part, part])["choices"] == module_server.chat("hello\nhello")["choices"]


def test_every_form_of_prompt_is_taken_and_choices_are_numbered(module_server: Served) -> None:
    def texts(prompt: Any, **more: Any) -> list[tuple[int, str]]:
        return [(choice["index"], choice["text"]) for choice in module_server.complete(prompt, **more)["choices"]]

    assert texts([104, 105]) == [(0, "hi")]
    assert texts(["a", "b"]) == [(0, "a"), (1, "b")]
    assert texts([[97], [98, 99]]) == [(0, "a"), (1, "bc")]
    assert texts(["a", "b"], n=2) == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_a_prompt_counts_once_however_many_choices_continue_it(module_server: Served) -> None:
    usage = module_server.complete(["abc", "de"], n=3)["usage"]

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 15)


def test_each_choice_draws_from_its_own_seed(serve: Any) -> None:
    server = serve(ScriptedEngine())
    server.complete(["a", "b"], n=3, seed=7)
    server.complete("c", n=2, seed=2**64 - 1)

    assert sorted(request.params.seed for request in server.engine.loop.submitted) == [0, 7, 7, 8, 8, 9, 9, 2**64 - 1]


def test_max_completion_tokens_wins_over_max_tokens(module_server: Served) -> None:
    answer = module_server.chat("hello", max_tokens=2, max_completion_tokens=4)

    assert answer["choices"][0]["message"]["content"] == "user"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_stop_after_16_tokens_unless_told(module_server: Served) -> None:
    assert module_server.complete("x" * 40)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stop", [[], None])
def test_an_empty_stop_is_no_stop(serve: Any, stop: Any) -> None:
    server = serve(ScriptedEngine())
    server.complete("a", stop=stop)
    server.complete("a")

    first, second = (request.params for request in server.engine.loop.submitted)
    assert first == second


INERT_AND_NEUTRAL = {
    "user": "me",
    "typical_p": 1,
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "n": None,
    "temperature": None,
    "stream": None,
    "whatever": None,
    "parallel_tool_calls": True,
}


def test_what_asks_for_nothing_is_accepted(module_server: Served) -> None:
    assert module_server.complete("ab", **INERT_AND_NEUTRAL)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("best_of", 10**6),
        ("suffix", "x"),
        ("guided_decoding_backend", "fast"),
        ("temprature", 0),
        ("priority", 1),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(
    module_server: Served, field: str, value: Any
) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        error = refusal(module_server.post(path, **body, **{field: value}))

        assert error["param"] == field
        assert repr(field) in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -5),
        ("top_k", 1.5),
        ("min_p", 2),
        ("typical_p", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 400: 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", [1]),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        pytest.param("max_tokens", 10**4300 - 1, id="max_tokens-nines"),
        ("n", 0),
        ("n", 17),
        ("n", 10**6),
        ("n", 10**30),
        ("seed", 2**64),
        ("seed", "1"),
        ("stop", ["x"] * 17),
        ("stop", ["x"] * 10_000),
        ("stop", "x" * 1025),
        ("stop", ""),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**30]),
        ("stop_token_ids", list(range(65))),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("model", 5),
        ("return_token_ids", "yes"),
        ("min_tokens", -1),
        ("mirostat", 1),
        ("mirostat_tau", 0),
        ("xtc_probability", 1.5),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_sequence_breakers", ["x"] * 129),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("allowed_token_ids", ["1"]),
        ("allowed_token_ids", []),
        ("include_stop_str_in_output", 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
    ],
)
def test_a_wrong_type_or_range_is_refused_by_name(module_server: Served, field: str, value: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        error = refusal(module_server.post(path, **body, **{field: value}))

        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").startswith(field), error


@pytest.mark.parametrize("value", [-1, 21, 10**9, 16384, True])
def test_logprobs_are_capped(module_server: Served, value: Any) -> None:
    completions = refusal(module_server.post(COMPLETIONS, prompt="a", logprobs=value))
    chat = refusal(module_server.post(CHAT, messages=HELLO, logprobs=True, top_logprobs=value))

    assert (completions["param"], chat["param"]) == ("logprobs", "top_logprobs")


def test_top_logprobs_without_logprobs_is_refused(module_server: Served) -> None:
    refusal(module_server.post(CHAT, messages=HELLO, top_logprobs=2))


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], None, 5, {}, [1.5], [True], [[1], [None]], ["a", 1]])
def test_an_empty_or_odd_prompt_is_refused_and_the_next_request_works(module_server: Served, prompt: Any) -> None:
    assert refusal(module_server.post(COMPLETIONS, prompt=prompt))["param"] == "prompt"
    assert module_server.complete("a")["choices"][0]["text"] == "a"


@pytest.mark.parametrize("prompt", [[-1], [257], [10**30], [[97], [-5]]])
def test_a_token_id_outside_the_vocabulary_is_refused(module_server: Served, prompt: Any) -> None:
    assert "vocabulary of 257" in refusal(module_server.post(COMPLETIONS, prompt=prompt))["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content"),
        ([{"role": "user", "content": [{}]}], "messages[0].content"),
        ([{"role": "user", "content": [None]}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool"}], "messages[1].content"),
        ([{"role": "assistant", "content": "first"}], "messages"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_naming_it(module_server: Served, messages: Any, param: str) -> None:
    error = refusal(module_server.post(CHAT, messages=messages))

    assert error["param"] == param


def test_a_bad_content_part_is_named(module_server: Served) -> None:
    parts = [{"type": "text", "text": "fine"}, {"type": "text"}]
    error = refusal(module_server.post(CHAT, messages=[{"role": "user", "content": parts}]))

    assert "part 1" in error["message"]


def test_the_templates_own_words_come_back_as_400(module_server: Served) -> None:
    error = refusal(module_server.post(CHAT, messages=[{"role": "assistant", "content": "x"}]))

    assert error["message"] == "conversation roles must alternate"


def test_a_message_as_the_client_got_it_can_be_sent_back(module_server: Served) -> None:
    answer = module_server.chat("hello")["choices"][0]["message"]
    extras = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}

    assert module_server.post(CHAT, messages=[*HELLO, answer | extras, *HELLO]).status_code == 200


def test_a_model_without_a_template_says_what_to_use_instead(serve: Any) -> None:
    engine = ScriptedEngine()
    engine.chat_template = None

    assert "/v1/completions" in refusal(serve(engine).post(CHAT, messages=HELLO))["message"]


RAW_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"prompt": "\xc4\xe3"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "min_p": "nan"}',
    b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "user": "\\udfff"}',
    b'{"prompt": "a", "\\ud800": 1}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}",
    b'{"prompt": "a"} trailing',
    "{“prompt”: “a”}".encode(),
    b"\xef\xbb\xbf" + b'{"prompt": "a"}',
]


@pytest.mark.parametrize("body", RAW_BODIES, ids=range(len(RAW_BODIES)))
def test_a_body_that_is_no_json_object_is_refused(module_server: Served, body: bytes) -> None:
    refusal(module_server.client.post(COMPLETIONS, content=body))
    refusal(module_server.client.post(CHAT, content=body))


def test_a_key_that_is_there_twice_is_refused_by_name(module_server: Served) -> None:
    refused = refusal(module_server.client.post(COMPLETIONS, content=b'{"prompt": "a", "n": 1, "prompt": "b"}'))
    inside = refusal(module_server.client.post(COMPLETIONS, content=b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}'))

    assert refused["message"] == "the body has the key 'prompt' twice in one object: give it once"
    assert "'1' twice" in inside["message"]


def test_a_compressed_body_is_415_and_an_unchanged_one_is_served(module_server: Served) -> None:
    for encoding, status in (("gzip", 415), ("br, gzip", 415), ("Identity", 200)):
        for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            response = module_server.client.post(path, json=body, headers={"content-encoding": encoding})

            assert response.status_code == status, response.text


def test_prompts_and_choices_are_bounded_together(module_server: Served) -> None:
    assert refusal(module_server.post(COMPLETIONS, prompt=["a"] * 9, n=16))["param"] == "n"


def test_a_body_past_the_limit_is_413_and_the_client_sees_it(serve: Any) -> None:
    from pocketllm.engine.serving.settings import ServerSettings

    server = serve(ScriptedEngine(), ServerSettings(max_body_bytes=10_000))

    assert refusal(server.post(COMPLETIONS, prompt="a" * 50_000), 413)["code"] == "request_too_large"
    assert refusal(server.client.post(COMPLETIONS, content=iter([b"x" * 9_000] * 5)), 413)
    assert server.post(COMPLETIONS, prompt="a" * 3_000).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_past_the_context_is_400_before_anything_is_sent(module_server: Served, stream: bool) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a" * 5000}),
        (COMPLETIONS, {"prompt": ["a", "a" * 5000]}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}),
    ):
        error = refusal(module_server.post(path, **body, stream=stream))

        assert error["code"] == "context_length_exceeded"
    assert module_server.complete("a")["choices"][0]["text"] == "a"


def test_one_prompt_that_never_fits_keeps_its_neighbors_from_starting(serve: Any) -> None:
    server = serve(ScriptedEngine())
    refusal(server.post(COMPLETIONS, prompt=["a", "a" * 5000]))

    assert server.engine.loop.submitted == []


def test_a_full_queue_is_503_with_a_time_to_come_back(serve: Any) -> None:
    server = serve(ScriptedEngine())
    server.engine.loop.refusal = QueueFullError("256 requests are waiting: come back later")

    response = server.post(COMPLETIONS, prompt="a", stream=True)

    assert refusal(response, 503)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    assert server.metric("admission_rejections_total", reason="queue_full") == 1


def test_a_request_that_is_more_than_may_ever_run_and_wait_is_400_and_no_time_to_come_back(serve: Any) -> None:
    server = serve(ScriptedEngine())
    server.engine.plan.limits.max_num_seqs = server.engine.plan.limits.max_queued_requests = 2
    response = server.post(COMPLETIONS, prompt=["a"] * 5, max_tokens=1)
    error = refusal(response, 400)

    assert error["param"] == "prompt"
    assert "5 answers" in error["message"]
    assert "max_num_seqs=2" in error["message"]
    assert "max_queued_requests=2" in error["message"]
    assert "retry-after" not in response.headers
    assert server.post(COMPLETIONS, prompt=["a"] * 4, max_tokens=1).status_code == 200
    assert refusal(server.post(COMPLETIONS, prompt="a", n=5, max_tokens=1), 400)["param"] == "n"


def test_a_queue_that_fills_up_between_two_choices_takes_back_the_first(serve: Any) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.01)
    server = serve(engine)
    take = engine.loop.submit

    def submit_two(request: Any, sink: Any) -> None:
        if len(engine.loop.submitted) == 2:
            raise QueueFullError("full: come back later")
        take(request, sink)

    engine.loop.submit = submit_two
    response = server.post(COMPLETIONS, prompt="a", n=3, max_tokens=4000)

    refusal(response, 503)
    until(lambda: not engine.loop.active)
    assert server.state.in_flight == set()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v1", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("POST", "/v1/embeddings", 501),
        ("POST", "/v1/audio/speech", 501),
        ("GET", "/v1/files", 501),
        ("GET", "/tokenize", 405),
        ("POST", "/v1/requests/nothing/cancel", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("HEAD", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/%2e%2e/%00", 404),
    ],
)
def test_an_unknown_route_or_method_is_refused_in_the_same_shape(
    module_server: Served, method: str, path: str, status: int
) -> None:
    response = module_server.client.request(method, path)

    assert response.status_code == status
    if method != "HEAD":
        refusal(response, status)


NAMES = st.sampled_from(
    [*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "response_format", "logit_bias", "user", "echo"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["scripted", "user", "text", 1, 2, 0.5, "a"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    base=st.sampled_from([{}, {"prompt": "ab"}, {"messages": HELLO}]),
    fields=st.dictionaries(NAMES, VALUES, max_size=4),
)
def test_no_body_whatever_brings_a_5xx(
    module_server: Served, path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    content = json.dumps(base | fields).encode()
    response = module_server.client.post(path, content=content)

    assert response.status_code in (200, 400, 404), content
    if response.status_code != 200:
        refusal(response, response.status_code)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_whatever_bring_a_5xx(module_server: Served, body: bytes) -> None:
    refusal(module_server.client.post(COMPLETIONS, content=body))

    assert module_server.client.get("/health").status_code == 200
