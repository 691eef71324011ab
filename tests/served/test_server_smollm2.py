"""The default model behind the server: answers that mean something, and requests long enough to be left."""

from typing import Any

import openai
import pytest

from tests.served.conftest import Served, http_request, until

pytestmark = pytest.mark.model

FRANCE: list[Any] = [{"role": "user", "content": "Name the capital of France."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def test_the_openai_client_learns_the_capital_of_france(smollm2_server: Served) -> None:
    with openai.OpenAI(base_url=smollm2_server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2-135m", messages=FRANCE, **GREEDY)
        chunks = list(client.chat.completions.create(model="smollm2-135m", messages=FRANCE, stream=True, **GREEDY))

    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_the_end_of_turn_token_is_counted_and_named_but_leaves_no_text(smollm2_server: Served) -> None:
    body = {"messages": FRANCE, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **GREEDY}
    choice = smollm2_server.post("/v1/chat/completions", **body).json()["choices"][0]
    entries = choice["logprobs"]["content"]

    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert (entries[-1]["token"], entries[-1]["bytes"]) == ("<|im_end|>", None)
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == choice["message"]["content"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_long_before_the_answer_is_done(
    smollm2_server: Served, stream: bool
) -> None:
    loop = smollm2_server.engine.loop
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    connection = smollm2_server.raw(http_request("/v1/completions", body))
    until(lambda: loop.stats().num_running == 1)
    connection.close()
    before = loop.stats().num_generation_tokens
    until(lambda: loop.stats().num_running == 0)

    assert loop.stats().num_generation_tokens - before < 300
    assert smollm2_server.metric("kv_cache_usage_perc") == 0


def test_leaving_during_a_long_prefill_ends_it_between_chunks(smollm2_server: Served) -> None:
    loop = smollm2_server.engine.loop
    before = loop.stats().num_step_tokens
    connection = smollm2_server.raw(http_request("/v1/completions", {"prompt": [500] * 1900, "max_tokens": 8}))
    until(lambda: loop.stats().num_running == 1)
    connection.close()
    until(lambda: loop.stats().num_running == 0)

    assert loop.stats().num_step_tokens - before < 1900
    assert smollm2_server.metric("kv_cache_usage_perc") == 0
