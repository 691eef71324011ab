"""What the other addresses say: tokens and templates, cancelling, Responses and Messages, streamed and whole."""

import json
from typing import Any

import openai
import pytest

from tests.served.conftest import Served, until
from tests.served.scripted import ScriptedEngine, slow
from tests.served.test_server_protocol import refusal

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ECHOED = "user: hello\n"


def events(server: Served, path: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """The named events of a stream; each is one name and one JSON document of the same type."""
    response = server.post(path, stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert document["type"] == name.removeprefix("event: ")
        found.append((document["type"], document))
    return found


def kinds(found: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Names of events, a run of deltas as one."""
    names = [name for name, _ in found]
    return [name for number, name in enumerate(names) if not number or name != names[number - 1]]


# -- tokens and templates
def test_tokens_are_those_that_a_completion_would_run(tiny_server: Served) -> None:
    prompt = "Once upon a time <|im_end|>"
    told = tiny_server.post("/tokenize", prompt=prompt, return_token_strs=True).json()
    [choice] = tiny_server.complete(prompt, return_token_ids=True, max_tokens=1)["choices"]

    assert told["tokens"] == choice["prompt_token_ids"]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == tiny_server.engine.plan.limits.max_model_len
    bare = tiny_server.post("/tokenize", prompt=prompt, add_special_tokens=False).json()["tokens"]
    assert tiny_server.post("/detokenize", tokens=bare).json() == {"prompt": prompt}


def test_tokens_of_messages_are_those_that_a_chat_would_run(tiny_server: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Yes, "}]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        told = tiny_server.post("/tokenize", messages=messages, **fields).json()["tokens"]
        answer = tiny_server.post(
            "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True, **fields
        ).json()
        text = tiny_server.post("/apply-template", messages=messages, **fields).json()["prompt"]

        assert told == answer["choices"][0]["prompt_token_ids"]
        assert tiny_server.post("/detokenize", tokens=told).json()["prompt"] == text
        assert text.endswith("Yes, ") == ("continue_final_message" in fields)


@pytest.mark.parametrize("content", ["OK! ", "OK!\n", "", "  x", "a <|im_end|> b", "{{ x }}"])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_continued_message_ends_the_prompt_exactly(tiny_server: Served, content: str, as_parts: bool) -> None:
    given: Any = [{"type": "text", "text": content}] if as_parts else content
    messages = [*HELLO, {"role": "assistant", "content": given}]
    base = tiny_server.post("/apply-template", messages=HELLO).json()["prompt"]
    told = tiny_server.post("/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
    plain = tiny_server.post("/apply-template", messages=messages, continue_final_message=True).json()["prompt"]

    assert plain == base + content
    end = tiny_server.engine.tokenizer.encode(content, add_special=False) if content else []
    assert told[len(told) - len(end) :] == end


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "whatever": 1}, "whatever"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/apply-template", {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, None),
        ("/apply-template", {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/apply-template", {"messages": HELLO, "continue_final_message": True}, "messages"),
        ("/v1/messages/count_tokens", {"messages": HELLO}, "model"),
    ],
)
def test_what_cannot_be_told_is_refused(tiny_server: Served, path: str, body: Any, param: str | None) -> None:
    response = tiny_server.post(path, **body)

    assert response.status_code == 400
    assert "count_tokens" in path or param is None or refusal(response)["param"] == param


@pytest.mark.parametrize(
    ("path", "what"), [("/v1/embeddings", "embeddings"), ("/v1/rerank", "reranking"), ("/rerank", "reranking")]
)
def test_an_api_that_is_not_served_is_501_and_says_so(module_server: Served, path: str, what: str) -> None:
    refused = refusal(module_server.post(path, input="a"), 501)

    assert refused["code"] == "not_supported"
    assert what in refused["message"]


@pytest.mark.parametrize("by", ["header", "answer"])
def test_a_request_can_be_cancelled_from_elsewhere(serve: Any, by: str) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.01)
    server = serve(engine)
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "a", "max_tokens": 4000, "stream": True},
        headers={"x-request-id": "mine"},
    ) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        name = first["id"] if by == "answer" else "mine"
        assert server.post(f"/v1/requests/{name}/cancel").json() == {"id": name, "cancelled": 1}
        last = [line for line in lines if line][-2:]

    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert last[1] == "data: [DONE]"
    until(lambda: not engine.loop.active)
    assert refusal(server.post(f"/v1/requests/{name}/cancel"), 404)["code"] == "request_not_found"


def test_every_chunk_tells_its_usage_when_asked_to(module_server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = module_server.stream("/v1/chat/completions", messages=HELLO, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert all(chunk["usage"]["prompt_tokens"] == len(ECHOED) for chunk in chunks)
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == len(ECHOED)


# -- Responses
def test_a_response_streams_openais_events_in_order(module_server: Served) -> None:
    found = events(module_server, "/v1/responses", input="hello", instructions=None)

    assert kinds(found) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [document["sequence_number"] for _, document in found] == list(range(len(found)))
    assert "".join(document["delta"] for name, document in found if name.endswith("text.delta")) == ECHOED
    last = found[-1][1]["response"]
    assert last["output"][0]["content"][0]["text"] == ECHOED
    assert last["usage"]["total_tokens"] == 2 * len(ECHOED)
    assert len({document["item_id"] for _, document in found if "item_id" in document}) == 1


def test_a_response_is_the_same_streamed_or_whole(module_server: Served) -> None:
    def lasting(response: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in response.items() if name not in ("id", "created_at")}
        return found | {"output": [item | {"id": None} for item in found["output"]]}

    for fields in ({}, {"max_output_tokens": 3}, {"metadata": {"a": "b"}, "temperature": 0.5}):
        whole = module_server.post("/v1/responses", input="hello", **fields).json()
        streamed = events(module_server, "/v1/responses", input="hello", **fields)[-1]

        assert lasting(streamed[1]["response"]) == lasting(whole)
        assert streamed[0] == f"response.{whole['status']}"
    assert module_server.post("/v1/responses", input="hello", max_output_tokens=3).json()["incomplete_details"] == {
        "reason": "max_output_tokens"
    }


def test_the_item_that_a_limit_cuts_is_incomplete_streamed_or_whole(module_server: Served) -> None:
    cut = module_server.post("/v1/responses", input="hello", max_output_tokens=3).json()
    whole = module_server.post("/v1/responses", input="hello").json()
    streamed = events(module_server, "/v1/responses", input="hello", max_output_tokens=3)
    [done] = [event["item"] for kind, event in streamed if kind == "response.output_item.done"]

    assert [item["status"] for item in cut["output"]] == ["incomplete"]
    assert [item["status"] for item in whole["output"]] == ["completed"]
    assert done["status"] == "incomplete"
    assert streamed[-1][1]["response"]["output"] == [done]


def test_the_openai_client_reads_responses(module_server: Served) -> None:
    with openai.OpenAI(base_url=module_server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="scripted", input=HELLO, instructions="Be kind.")
        with client.responses.stream(model="scripted", input="hello") as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()

    assert whole.output_text == "system: Be kind.\n" + ECHOED
    assert "".join(texts) == final.output_text == ECHOED
    assert final.status == "completed"


def test_a_response_tells_log_probabilities_when_asked_to(module_server: Served) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = module_server.post("/v1/responses", **body).json()["output"]
    told = item["content"][0]["logprobs"]

    assert "".join(entry["token"] for entry in told) == "user: hi\n"
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "c"},
        {"truncation": "auto"},
        {"include": ["file_search_call.results"]},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": 5},
        {"max_output_tokens": 0},
        {"whatever": 1},
        {"n": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_stateless_response_cannot_do_is_refused(module_server: Served, fields: dict[str, Any]) -> None:
    refusal(module_server.post("/v1/responses", **({"input": "hello"} | fields)))


def test_a_failing_engine_ends_a_response_in_one_failed_event(serve: Any) -> None:
    engine = ScriptedEngine()
    engine.loop.script = lambda request: iter([(120, "x"), "broken"])
    found = events(serve(engine), "/v1/responses", input="a")

    assert kinds(found)[-1] == "response.failed"
    assert found[-1][1]["response"]["error"]["code"] == "server_error"


# -- Messages
MESSAGE: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "messages": HELLO}


def test_a_message_streams_anthropics_events_in_order(module_server: Served) -> None:
    found = events(module_server, "/v1/messages", **MESSAGE)

    assert kinds(found) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = found[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] == len(ECHOED)
    deltas = [document["delta"] for name, document in found if name == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == ECHOED
    assert found[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == len(ECHOED)


def test_a_message_names_its_stop_sequence(tiny_server: Served) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    body = {"model": "llama", "max_tokens": 24, "temperature": 0, "messages": messages}
    text = tiny_server.post("/v1/messages", **body).json()["content"][0]["text"]
    whole = tiny_server.post("/v1/messages", **body, stop_sequences=[text[4:6]]).json()
    streamed = events(tiny_server, "/v1/messages", **body, stop_sequences=[text[4:6]])

    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert streamed[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[4:6]}
    assert tiny_server.post("/v1/messages", **body | {"max_tokens": 2}).json()["stop_reason"] == "max_tokens"


def test_system_texts_and_blocks_reach_the_model(module_server: Served) -> None:
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = MESSAGE | {"system": system, "messages": [{"role": "user", "content": blocks}], "metadata": {"user_id": "u"}}
    expected = "system: Be kind.\nuser: one\ntwo\n"

    assert module_server.post("/v1/messages", **body).json()["content"] == [{"type": "text", "text": expected}]
    del body["max_tokens"]
    assert module_server.post("/v1/messages/count_tokens", **body).json() == {"input_tokens": len(expected)}


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("responses", {"input": 5}, "input", "input: Input should be a valid string or a valid list"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input", "input holds no message"),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ("chat/completions", {"stop": 5}, "stop", "must be a text or a list of texts"),
        ("chat/completions", {"tool_choice": {"type": "auto"}}, "tool_choice", "none, auto and required are texts"),
        ("chat/completions", {"tool_choice": 5}, "tool_choice", "Input should be a valid string or a valid dictionary"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1"),
    ],
)
def test_a_field_is_refused_by_the_name_that_the_client_gave_it(
    module_server: Served, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    messages = {} if path == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    error = refusal(module_server.post(f"/v1/{path}", **messages, **fields))

    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "wizard"}},
        {"whatever": 1},
        {"model": "other"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_message_that_cannot_be_served_is_refused_in_anthropics_shape(
    module_server: Served, fields: dict[str, Any]
) -> None:
    response = module_server.post("/v1/messages", **(MESSAGE | fields))

    assert response.status_code == (404 if "model" in fields else 400)
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert response.json()["error"]["message"]


def test_a_client_that_leaves_a_message_or_a_response_frees_the_engine(serve: Any) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.01)
    server = serve(engine)
    long = {"max_tokens": 4000}  # longer than a busy machine may keep this client waiting
    for path, body in (("/v1/messages", MESSAGE | long), ("/v1/responses", {"input": "a"})):
        with server.client.stream("POST", path, json=body | {"stream": True}) as stream:
            next(stream.iter_lines())
            assert engine.loop.active
        until(lambda: not engine.loop.active and not server.state.in_flight)
