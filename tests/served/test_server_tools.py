"""Tools over HTTP: what is refused, what the model is told, how calls and thoughts come back, streamed and whole."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pocketllm.engine.lifecycle.request import FinishReason, Request
from tests.served.conftest import Served
from tests.served.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "how it is" </tool_call>\n{é}',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BOTH = f'Let me see. {PARIS}\n<tool_call>{{"arguments": {{}}, "name": "now"}}</tool_call>'


def says(text: str, size: int = 3, reason: FinishReason = FinishReason.STOP) -> Callable[[Request], Iterable[Any]]:
    """A script that writes `text`, `size` characters a token."""

    def script(request: Request) -> Iterable[Any]:
        for begin in range(0, len(text), size):
            yield 65, text[begin : begin + size]
        yield reason

    return script


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    engine = ScriptedEngine()
    engine.chat_template.source = "<tool_call> <think></think>"  # type: ignore[union-attr]  # this engine has a template
    return serve(engine)


def streamed(server: Served, **body: Any) -> dict[str, Any]:
    """The message that a stream adds up to, with its finish reason."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "reasons": []}
    for chunk in server.stream(CHAT, messages=ASK, **body):
        [choice] = chunk["choices"]
        delta = choice["delta"]
        assert set(choice) >= {"finish_reason", "index", "delta"}
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                assert call["index"] == len(found["calls"])
                found["calls"][call["index"]] = [call["function"]["name"], ""]
            else:
                assert set(call) == {"index", "function"}
                found["calls"][call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert delta == {}
            found["reasons"].append(choice["finish_reason"])
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_two_calls_come_back_the_same_streamed_in_any_pieces_and_whole(server: Served, size: int) -> None:
    server.engine.loop.script = says(f"<think>hm</think>\n{BOTH}", size)
    found = streamed(server, tools=TOOLS)
    [choice] = server.post(CHAT, messages=ASK, tools=TOOLS).json()["choices"]

    calls = [["weather", '{"city": "Paris"}'], ["now", "{}"]]
    assert list(found["calls"].values()) == calls
    assert found["reasons"] == ["tool_calls"]
    assert (found["content"], found["reasoning"]) == ("Let me see.", "hm")
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "hm")
    assert [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]] == calls
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_beside_a_lone_call_and_that_message_may_be_sent_back(server: Served) -> None:
    server.engine.loop.script = says(PARIS)
    message = server.post(CHAT, messages=ASK, tools=TOOLS).json()["choices"][0]["message"]

    assert message["content"] is None
    del message["refusal"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    without_content = {name: value for name, value in message.items() if name != "content"}
    for said in (message, without_content):
        assert server.post(CHAT, messages=[*ASK, said, result], tools=TOOLS).status_code == 200


@pytest.mark.parametrize("arguments", ["null", "", "{}"])
def test_calls_without_arguments_in_the_history_are_taken(server: Served, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    history = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "3"}]

    assert server.post(CHAT, messages=history).status_code == 200


def test_only_one_call_comes_back_where_calls_may_not_be_parallel(server: Served) -> None:
    server.engine.loop.script = says(BOTH, 1000)
    message = server.post(CHAT, messages=ASK, tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]

    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert len(streamed(server, tools=TOOLS, parallel_tool_calls=False)["calls"]) == 1


def test_marks_of_calls_stay_text_where_no_tool_may_be_called(server: Served) -> None:
    server.engine.loop.script = says(BOTH)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = server.post(CHAT, messages=ASK, **body).json()["choices"][0]

        assert choice["message"]["content"] == BOTH
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_a_call_that_was_cut_at_the_limit_comes_as_far_as_it_got(server: Served) -> None:
    server.engine.loop.script = says(PARIS[:-25], reason=FinishReason.LENGTH)
    choice = server.post(CHAT, messages=ASK, tools=TOOLS).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])
    assert streamed(server, tools=TOOLS)["reasons"] == ["length"]


def test_what_might_have_become_a_mark_is_told_in_the_end(server: Served) -> None:
    server.engine.loop.script = says("Either a < b or <tool_ca", 1)
    found = streamed(server, tools=TOOLS)

    assert (found["content"], found["reasons"]) == ("Either a < b or <tool_ca", ["stop"])
    assert server.post(CHAT, messages=ASK, tools=TOOLS).json()["choices"][0]["message"]["content"] == found["content"]


def test_every_choice_has_calls_of_its_own(server: Served) -> None:
    server.engine.loop.script = says(PARIS, 4)
    choices = server.post(CHAT, messages=ASK, tools=TOOLS, n=3).json()["choices"]
    chunks = server.stream(CHAT, messages=ASK, tools=TOOLS, n=3)

    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len(set(ids)) == 3
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"] == "tool_calls"]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": [NOW, NOW]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nowhere"}}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}, "x": 1}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [*ASK, {"role": "tool", "tool_call_id": "a"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ],
)
def test_what_is_wrong_with_tools_is_named(server: Served, body: dict[str, Any], param: str) -> None:
    response = server.post(CHAT, **{"messages": ASK, **body})

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_forced_call_that_max_tokens_cuts_before_its_arguments_is_a_length_and_no_content(server: Served) -> None:
    server.engine.loop.script = says('<tool_call>\n{"name":', reason=FinishReason.LENGTH)
    forced = {"tools": TOOLS, "tool_choice": "required"}
    streams = streamed(server, **forced)
    [choice] = server.post(CHAT, messages=ASK, **forced).json()["choices"]
    free = streamed(server, tools=TOOLS)

    assert (streams["content"], streams["calls"], streams["reasons"]) == ("", {}, ["length"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert "tool_calls" not in choice["message"]
    assert free["content"] == '<tool_call>\n{"name":'


def test_a_forced_call_is_asked_of_the_engine_as_a_grammar(server: Served) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        server.post(CHAT, messages=ASK, tools=TOOLS, tool_choice=choice)

    every, named = (request.params.constraint for request in server.engine.loop.submitted)
    assert every.kind == named.kind == "tools"
    assert "now" in every.grammar
    assert "now" not in named.grammar
    assert "</think>" in every.preface
    assert server.engine.loop.compiled == [every, named]


def test_calls_of_strict_tools_are_held_to_their_schemas_and_others_are_free(server: Served) -> None:
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    for tools in ([strict, NOW], TOOLS):
        assert server.post(CHAT, messages=ASK, tools=tools).status_code == 200

    held, free = (request.params.constraint for request in server.engine.loop.submitted)
    assert "city" in held.grammar
    assert free is None


def test_descriptions_never_reach_the_grammar(server: Served) -> None:
    plain = json.loads(json.dumps(WEATHER))
    plain["function"]["description"] = ""
    for tool in (WEATHER, plain):
        assert server.post(CHAT, messages=ASK, tools=[tool], tool_choice="required").status_code == 200

    first, second = (request.params.constraint for request in server.engine.loop.submitted)
    assert first == second


def test_a_thought_opened_by_the_prompt_is_told_apart(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.chat_template.source = "<think>\n</think>"  # type: ignore[union-attr]  # this engine has a template
    engine.chat_template.render = lambda messages, **more: "user: hi\n<think>\n"  # type: ignore[method-assign,union-attr]  # replaced for this test
    server = serve(engine)
    engine.loop.script = says("hm, hm\n</think>\n\nYes.", 2)

    found = streamed(server)
    message = server.post(CHAT, messages=ASK).json()["choices"][0]["message"]

    assert (found["reasoning"], found["content"], found["reasons"]) == ("hm, hm", "Yes.", ["stop"])
    assert (message["reasoning_content"], message["content"]) == ("hm, hm", "Yes.")
    markup = engine.loop.submitted[0].params.markup
    assert markup.thought.is_open
