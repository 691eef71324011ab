"""Answers held to a grammar over HTTP, from a random model: whatever it would like to say, the grammar holds."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from pocketllm.bench.scenarios.structured import SCHEMA
from pocketllm.bench.targets.contract import Ask, Need
from pocketllm.bench.targets.engine import EngineTarget
from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
from tests.served.conftest import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Say something."}]
COLOR = {
    "type": "object",
    "properties": {"color": {"$ref": "#/$defs/Color"}, "count": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["color", "count"],
    "additionalProperties": False,
    "$defs": {"Color": {"enum": ["red", "green", "blue"]}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "color", "strict": True, "schema": COLOR}}
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 120}
RESULT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
# few words: the random model's context is short
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("a", RESULT), ("b", NUMBER))
]
SHORT = DRAWN | {"max_tokens": 60, "parallel_tool_calls": False}


def is_color(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"color", "count"} and found["color"] in ("red", "green", "blue") and 0 <= found["count"] < 1000
    )


@pytest.mark.parametrize(
    ("fields", "obeys"),
    [
        ({"response_format": FORMAT}, is_color),
        ({"response_format": {"type": "json_object", "schema": COLOR}}, is_color),
        ({"structured_outputs": {"json": COLOR}}, is_color),
        ({"guided_json": json.dumps(COLOR)}, is_color),
        ({"json_schema": COLOR}, is_color),
        ({"structured_outputs": {"regex": r"^\d{4}-(a|b)/c$"}}, lambda text: re.fullmatch(r"[0-9]{4}-(a|b)/c", text)),
        ({"guided_regex": "[ab]{3,9}"}, lambda text: re.fullmatch("[ab]{3,9}", text)),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n', "😀"]}}, lambda text: text in ("yes", 'n"o\n', "😀")),
        ({"guided_choice": ["a", "ab"]}, lambda text: text in ("a", "ab")),
        ({"grammar": 'root ::= "x" ("-" [0-9]){2} "\\u00e9"'}, lambda text: re.fullmatch("x(-[0-9]){2}é", text)),
        ({"guided_grammar": 'start: "(" start ")" | "x"'}, lambda text: text.strip("()") == "x"),
        ({"structured_outputs": {"grammar": 'start: /[0-9]+/ "!"'}}, lambda text: re.fullmatch("[0-9]+!", text)),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_every_spelling_of_a_constraint_holds_in_both_endpoints_streamed_and_whole(
    tiny_server: Served, fields: dict[str, Any], obeys: Callable[[str], object]
) -> None:
    for path, prompt in ((CHAT, {"messages": ASK}), (COMPLETIONS, {"prompt": "Once"})):
        body = {**prompt, **DRAWN, **fields}
        [choice] = tiny_server.post(path, **body).json()["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        parts = [chunk["choices"][0] for chunk in tiny_server.stream(path, **body)]

        streamed = "".join(part["delta"].get("content") or "" if path == CHAT else part["text"] for part in parts)
        assert streamed == text
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if choice["finish_reason"] == "stop":
            assert obeys(text), text


def test_json_object_alone_is_an_object_or_was_cut(tiny_server: Served) -> None:
    body = {"messages": ASK, "response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": 300, "n": 8}
    choices = tiny_server.post(CHAT, seed=3, **body).json()["choices"]

    assert all(choice["message"]["content"].startswith("{") for choice in choices)
    for choice in choices:
        # blanks are bounded, so that a model that likes them cannot fill an answer with them
        assert not re.search(r"[ \t]{45}|\n\n\n", re.sub(r'"(\\.|[^"\\])*"?', "", choice["message"]["content"]))
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_rows_without_a_constraint_are_what_they_are_alone(tiny_server: Served) -> None:
    free = {"prompt": "Once upon", "temperature": 1, "seed": 11, "max_tokens": 60, "ignore_eos": True}
    held = {"prompt": "Once upon", "response_format": FORMAT, **DRAWN, "n": 4}
    alone = tiny_server.post(COMPLETIONS, **free).json()["choices"][0]["text"]
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(tiny_server.post, COMPLETIONS, **body) for body in [free, held, free, held, free]]
        answers = [call.result().json()["choices"] for call in calls]

    assert {answers[place][0]["text"] for place in (0, 2, 4)} == {alone}
    assert all(is_color(choice["text"]) for place in (1, 3) for choice in answers[place])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(abc"}, "guided_regex"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "a{2,1}"}, "guided_regex"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": COLOR, "backend": "x"}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"grammar": 'rout::="route"'}, "grammar"),
        ({"grammar": "root ::="}, "grammar"),
        ({"grammar": "root ::= root"}, "grammar"),
        ({"grammar": 'root ::= "a" | b'}, "grammar"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
        ({"json_schema": {"type": "string", "format": "no-such-format"}}, "json_schema"),
        ({"json_schema": {"type": "strin"}}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": {"type": "object", "required": ["a"], "properties": {"a": False}}}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ({"json_schema": {"enum": ["x" * 300_000]}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_held_to_is_refused_in_a_sentence_and_the_server_goes_on(
    tiny_server: Served, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = tiny_server.post(CHAT, messages=ASK, stream=stream, **fields)

        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param, error
        assert 10 < len(error["message"]) < 1000
        assert "\n" not in error["message"]
        assert "panic" not in error["message"]
    assert tiny_server.post(COMPLETIONS, prompt="x", max_tokens=4, guided_regex="a+").status_code == 200


def test_a_good_constraint_after_a_bad_one_of_its_kind_is_served(tiny_server: Served) -> None:
    codes = [
        tiny_server.post(COMPLETIONS, prompt="x", max_tokens=4, guided_regex=pattern).status_code
        for pattern in ("^(.*)$", "^(|.*)$", "^(.*$", "^(.*)$")
    ]

    assert codes == [200, 200, 400, 200]


def test_an_answer_that_cannot_go_on_ends_in_an_error_and_is_not_let_loose(tiny_server: Served) -> None:
    dead = {"guided_grammar": 'start: "abc" /[^\\x00-\\x{10FFFF}]/', "prompt": "x", "max_tokens": 40}
    whole = tiny_server.post(COMPLETIONS, **dead)
    events = tiny_server.post(COMPLETIONS, stream=True, **dead).text.split("\n\n")

    assert whole.status_code == 422, whole.text
    assert whole.json()["error"]["code"] == "structured_output_failed"
    told = [json.loads(event[6:]) for event in events if event and event != "data: [DONE]"]
    assert told[-1]["error"]["code"] == "structured_output_failed"
    assert "".join(chunk["choices"][0]["text"] for chunk in told[:-1]) in ("", "abc", "ab", "a")
    assert tiny_server.engine.loop.stats().num_running == 0


def test_the_token_limit_and_stop_strings_cut_a_held_answer_short(tiny_server: Served) -> None:
    cut = tiny_server.complete("x", guided_regex="a{30,}", max_tokens=5, temperature=0)["choices"][0]
    stopped = tiny_server.complete("x", guided_regex="a{30}-b{30}", stop="-", max_tokens=80)["choices"][0]

    assert cut["finish_reason"] == "length"
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", "a" * 30)


def test_a_stop_token_cannot_end_a_string_that_is_open(tiny_server: Served) -> None:
    quote = tiny_server.engine.tokenizer.encode('"', add_special=False)
    held = {"stop_token_ids": quote, "guided_regex": '["ab]{8}c', "temperature": 2, "seed": 1, "max_tokens": 20}
    choices = tiny_server.complete("x", n=8, **held)["choices"]

    assert all(re.fullmatch("[ab]{8}c", choice["text"]) for choice in choices)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_where_nothing_may_follow(tiny_server: Served, ignore_eos: bool) -> None:
    choice = tiny_server.complete("x", guided_regex="ab{2,4}", ignore_eos=ignore_eos, max_tokens=50)["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("ab{4}" if ignore_eos else "ab{2,4}", choice["text"])


def test_required_calls_are_calls_whatever_the_model_says(tiny_server: Served) -> None:
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", **SHORT}
    choices = tiny_server.post(CHAT, n=6, **body).json()["choices"]
    ended = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]

    assert ended
    for choice in ended:
        [call] = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments["ok"], bool) if call["function"]["name"] == "a" else arguments["n"] in (1, 2)


def test_a_named_call_is_exactly_one_and_required_calls_are_one_or_more(tiny_server: Served) -> None:
    body = {"messages": ASK, "tools": TOOLS, **DRAWN, "n": 8, "max_tokens": 150}
    named = tiny_server.post(CHAT, **body, tool_choice={"type": "function", "function": {"name": "a"}}).json()
    required = tiny_server.post(CHAT, **body, tool_choice="required").json()
    counts = [
        [len(one["message"]["tool_calls"]) for one in found["choices"] if one["finish_reason"] == "tool_calls"]
        for found in (named, required)
    ]

    assert set(counts[0]) == {1}
    assert min(counts[1]) == 1
    assert max(counts[1]) > 1


def test_a_named_call_is_that_call_and_streams_its_arguments(tiny_server: Served) -> None:
    named = {"type": "function", "function": {"name": "a"}}
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": named, **DRAWN}
    chunks = [chunk["choices"][0] for chunk in tiny_server.stream(CHAT, **body)]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]

    assert [call["function"]["name"] for call in calls if "id" in call] == ["a"]
    arguments = json.loads("".join(call["function"]["arguments"] for call in calls))
    assert isinstance(arguments["ok"], bool)
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_with_tools_a_schema_is_held_to_unless_a_tool_is_called(tiny_server: Served) -> None:
    body = {"messages": ASK, "tools": TOOLS, "response_format": FORMAT, **SHORT}
    choices = tiny_server.post(CHAT, n=8, **body).json()["choices"]

    for choice in choices:
        if choice["finish_reason"] == "stop":
            assert is_color(choice["message"]["content"])
        elif choice["finish_reason"] == "tool_calls":
            assert choice["message"]["content"] is None


def test_a_recursive_schema_is_held_to(tiny_server: Served) -> None:
    tree = {
        "type": "object",
        "properties": {
            "tree": {
                "type": "object",
                "properties": {
                    "kids": {
                        "type": "array",
                        "maxItems": 2,
                        "items": {"anyOf": [{"$ref": "#/properties/tree"}, {"type": "null"}]},
                    }
                },
                "required": ["kids"],
                "additionalProperties": False,
            }
        },
        "required": ["tree"],
        "additionalProperties": False,
    }
    choices = tiny_server.post(CHAT, messages=ASK, json_schema=tree, n=4, **DRAWN).json()["choices"]
    whole = [json.loads(one["message"]["content"]) for one in choices if one["finish_reason"] == "stop"]

    assert whole
    assert all(set(one) == {"tree"} and set(one["tree"]) == {"kids"} for one in whole)


def test_a_compilation_is_counted_once(tiny_server: Served) -> None:
    before = tiny_server.metric("grammar_compilation_seconds_count")
    for _ in range(3):
        tiny_server.complete("x", guided_regex="only[ ]here", max_tokens=2, n=2)

    assert tiny_server.metric("grammar_compilation_seconds_count") == before + 1


@pytest.mark.parametrize(
    ("arguments", "status"), [("{not json", 400), ("[1]", 400), ("null", 200), ('{"ok": true}', 200)]
)
def test_arguments_of_earlier_calls_are_read_before_the_model_is_told(
    tiny_server: Served, arguments: str, status: int
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "a", "arguments": arguments}}
    history = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "3"}]

    assert tiny_server.post(CHAT, messages=history, max_tokens=2).status_code == status


@pytest.mark.parametrize("over_http", [False, True])
def test_the_structured_scenario_finds_its_answers_held_and_as_long_as_asked(
    tiny_server: Served, over_http: bool
) -> None:
    target: Any = OpenAIHTTPTarget(tiny_server.url) if over_http else EngineTarget(tiny_server.engine.sibling())
    ask = Ask("x", tuple(range(5, 25)), "", 64, json_schema=SCHEMA)

    held, free = target.ask(ask), target.ask(replace(ask, json_schema=None))
    target.close()

    assert Need.STRUCTURED in target.has
    assert (held.error, free.error) == (None, None)
    assert (held.n_out, free.n_out) == (64, 64)
    assert re.match(r'\{\s{0,41}"entries"\s{0,41}:', held.out_text)
    assert held.out_text != free.out_text


class Paint(BaseModel):
    """What the client's own helpers make schemas and tools of."""

    color: Literal["red", "green"]
    coats: Literal[1, 2]


@pytest.mark.model
def test_the_openai_client_parses_models_and_streams_tools_of_them(smollm2_server: Served) -> None:
    with openai.OpenAI(base_url=smollm2_server.url + "/v1", api_key="none", max_retries=0) as client:
        ask: Any = {"model": "smollm2-135m", "messages": ASK, "temperature": 0, "max_tokens": 60}
        parsed = client.chat.completions.parse(**ask, response_format=Paint).choices[0]
        tools: Any = [openai.pydantic_function_tool(Paint)]
        with client.chat.completions.stream(
            **ask, tools=tools, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]

    assert isinstance(parsed.message.parsed, Paint)
    assert [event.name for event in done] == ["Paint"]
    assert isinstance(done[0].parsed_arguments, Paint)
    assert final.finish_reason == "tool_calls"


@pytest.mark.model
def test_a_weak_model_cannot_fill_its_answer_with_blanks(smollm2_server: Served) -> None:
    body = {"messages": ASK, "response_format": {"type": "json_object"}, "temperature": 1.2, "max_tokens": 40}
    for choice in smollm2_server.post(CHAT, n=16, seed=0, **body).json()["choices"]:
        text = choice["message"]["content"]

        assert text.startswith("{")
        outside = re.sub(r'"(\\.|[^"\\])*"?', "x", text)
        assert not re.search(r"\n[ \t]*\n|[ \t]{41}", outside), text
        if choice["finish_reason"] == "stop":
            json.loads(text)
