"""Thoughts and tool calls through Responses and Messages: one answer, read the same by three APIs."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.served.conftest import Served
from tests.served.scripted import ScriptedEngine
from tests.served.test_server_endpoints import events, kinds
from tests.served.test_server_tools import BOTH, NOW, WEATHER, says

ANSWER = f"<think>hm</think>\n{BOTH}"
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
FLAT = [{"type": "function", **one["function"]} for one in (WEATHER, NOW)]
CLAUDE = [
    {"name": one["function"]["name"], "input_schema": one["function"].get("parameters", {"type": "object"})}
    for one in (WEATHER, NOW)
]
MESSAGE = {"model": "scripted", "max_tokens": 500, "messages": ASK, "tools": CLAUDE}


@pytest.fixture(params=[1, 7, 1000])
def server(serve: Callable[..., Served], request: pytest.FixtureRequest) -> Served:
    engine = ScriptedEngine()
    engine.chat_template.source = "<tool_call> <think></think>"  # type: ignore[union-attr]  # this engine has a template
    engine.loop.script = says(ANSWER, request.param)
    return serve(engine)


def test_responses_have_a_reasoning_item_a_message_and_function_calls(server: Served) -> None:
    found = events(server, "/v1/responses", input=ASK, tools=FLAT)
    output = found[-1][1]["response"]["output"]

    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [(item["name"], json.loads(item["arguments"])) for item in output[2:]] == [
        ("weather", {"city": "Paris"}),
        ("now", {}),
    ]
    names = kinds(found)
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 4
    for index, item in enumerate(output):
        own = [document for _, document in found if document.get("output_index") == index]
        deltas = "".join(document["delta"] for document in own if document["type"].endswith(".delta"))
        expected = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == expected
        assert own[-1]["item"] == item
    whole = server.post("/v1/responses", input=ASK, tools=FLAT).json()["output"]
    assert [item | {"id": None, "call_id": None} for item in whole] == [
        item | {"id": None, "call_id": None} for item in output
    ]


def test_no_count_of_a_thoughts_tokens_is_made_up_and_null_is_the_default_in_force(
    serve: Callable[..., Served],
) -> None:
    engine = ScriptedEngine()
    engine.chat_template.source = "<tool_call> <think></think>"  # type: ignore[union-attr]  # this engine has a template
    details = []
    for answer in (ANSWER, "Yes."):
        engine.loop.script = says(answer, 7)
        found = serve(engine).post("/v1/responses", input=ASK, temperature=None, top_p=None).json()
        details.append(found["usage"]["output_tokens_details"])

        assert (found["temperature"], found["top_p"]) == (1.0, 1.0)

    assert details == [{}, {"reasoning_tokens": 0}]


def test_the_openai_client_gathers_calls_and_can_send_them_back(server: Served) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model="scripted", input=ASK, tools=FLAT) as stream:  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
            for _ in stream:
                pass
            final = stream.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        back: list[Any] = [*ASK, *(item.model_dump(exclude_none=True) for item in final.output)]
        back += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
        client.responses.create(model="scripted", input=back, tools=FLAT)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    prompt = bytes(server.engine.loop.submitted[-1].prompt_token_ids).decode()

    assert [call.name for call in calls] == ["weather", "now"]
    assert prompt.count("sunny") == 2


def test_messages_have_thinking_text_and_tool_use_blocks(server: Served) -> None:
    found = events(server, "/v1/messages", **MESSAGE)
    whole = server.post("/v1/messages", **MESSAGE).json()

    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Paris"}, {}]
    assert whole["stop_reason"] == "tool_use"
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    for index, block in enumerate(whole["content"]):
        own = [document for _, document in found if document.get("index") == index]
        assert [own[0]["type"], own[-1]["type"]] == ["content_block_start", "content_block_stop"]
        assert own[0]["content_block"]["type"] == block["type"]
        field = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        text = "".join(document["delta"][field] for document in own[1:-1])
        assert (json.loads(text or "{}") if "input" in block else text) == block.get("input", block.get(field))


def test_a_message_with_calls_can_be_sent_back(server: Served) -> None:
    whole = server.post("/v1/messages", **MESSAGE).json()
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
        for block in whole["content"]
        if block["type"] == "tool_use"
    ]
    back = [*ASK, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
    answer = server.post("/v1/messages", **(MESSAGE | {"messages": back}))

    assert answer.status_code == 200, answer.text
    prompt = bytes(server.engine.loop.submitted[-1].prompt_token_ids).decode()
    assert prompt.count("sunny") == 2
