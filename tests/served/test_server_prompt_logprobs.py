"""What is told of a prompt: echo, its log-probabilities, and where the answer's texts lie after it."""

import threading
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.serving.transport import aside
from tests.served.conftest import Served, until
from tests.served.test_server_protocol import refusal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = ["Your answer: Yes", "\n1. Carol has 20", "äöü 日本 🙂 done"]
LEAST = {"temperature": 0, "max_tokens": 6}


def log_softmax(logits: Any) -> Any:
    values = np.asarray(logits, np.float64)
    return (
        values
        - values.max(-1, keepdims=True)
        - np.log(np.exp(values - values.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


def scored(server: Served, token_ids: list[int]) -> Any:
    """Log-probabilities of each token after the first, from the engine's logits of the whole prompt."""
    from pocketllm.engine.lifecycle.request import Request
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams

    events: list[Any] = []
    done = threading.Event()

    def sink(event: Any) -> None:
        events.append(event)
        done.set()

    server.engine.loop.submit(Request("scored", token_ids, SamplingParams(), wants_prompt_logits=True), sink)
    assert done.wait(20)
    rows = log_softmax(events[0].prompt_logits)
    return rows[np.arange(len(token_ids) - 1), token_ids[1:]]


@pytest.mark.parametrize("text", TEXTS)
def test_echo_gives_the_prompts_own_log_probabilities_and_then_the_answers(tiny_server: Served, text: str) -> None:
    prompt = tiny_server.engine.tokenizer.encode(text)
    alone = tiny_server.complete(text, logprobs=2, **LEAST)["choices"][0]
    both = tiny_server.complete(text, logprobs=2, echo=True, **LEAST)["choices"][0]
    found = both["logprobs"]

    assert both["text"] == text + alone["text"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(prompt) + 6
    }
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1 : len(prompt)], scored(tiny_server, prompt), atol=1e-4)
    np.testing.assert_allclose(found["token_logprobs"][len(prompt) :], alone["logprobs"]["token_logprobs"], atol=1e-4)
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])
    shift = found["text_offset"][len(prompt)]
    assert [offset - shift for offset in found["text_offset"][len(prompt) :]] == alone["logprobs"]["text_offset"]
    assert shift == len(text)


@pytest.mark.parametrize("prompt", ["Your answer: Yes", [5, 6, 7]])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_echo_without_an_answer_is_the_prompt_alone(tiny_server: Served, prompt: Any, logprobs: int | None) -> None:
    answer = tiny_server.complete(prompt, echo=True, max_tokens=0, logprobs=logprobs)
    [choice] = answer["choices"]

    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    expected = prompt if isinstance(prompt, str) else tiny_server.engine.tokenizer.decode(prompt)
    assert choice["text"] == expected
    assert (choice["logprobs"] is None) == (logprobs is None)


@pytest.mark.parametrize("text", TEXTS)
def test_a_streamed_echo_adds_up_to_the_whole_one(tiny_server: Served, text: str) -> None:
    body = {"prompt": text, "echo": True, "logprobs": 1, "n": 2, "seed": 4, "max_tokens": 5, "temperature": 1}
    whole = tiny_server.complete(**body)["choices"]
    chunks = [chunk["choices"][0] for chunk in tiny_server.stream(COMPLETIONS, **body)]

    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [item for chunk in own if chunk["logprobs"] for item in chunk["logprobs"][name]] == values
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])


def test_prompt_logprobs_name_ids_ranks_and_texts(tiny_server: Served) -> None:
    prompt = tiny_server.engine.tokenizer.encode("Once upon a time")
    [choice] = tiny_server.complete(prompt, prompt_logprobs=2, max_tokens=1)["choices"]
    found = choice["prompt_logprobs"]

    assert found[0] is None
    expected = scored(tiny_server, prompt)
    for token_id, value, entry in zip(prompt[1:], expected, found[1:], strict=True):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(value, abs=1e-4)
        assert own["decoded_token"]
        assert [one["rank"] for one in entry.values()][:2] == [1, 2]
        assert all(own["rank"] > 2 for _ in entry if len(entry) == 3)


def test_a_chat_tells_its_prompts_log_probabilities_beside_its_choices(tiny_server: Served) -> None:
    answer = tiny_server.chat("hi", prompt_logprobs=0, max_tokens=1, n=2, return_token_ids=True)
    prompt = answer["choices"][0]["prompt_token_ids"]

    assert [set(entry) for entry in answer["prompt_logprobs"][1:]] == [{str(token_id)} for token_id in prompt[1:]]


def test_choices_that_only_echo_are_scored_with_the_first(tiny_server: Served) -> None:
    body = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "logprobs": 1}
    first, second = tiny_server.complete(**body, n=2)["choices"]
    [alone] = tiny_server.complete(**body)["choices"]

    assert first == alone
    assert second == alone | {"index": 1}


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_prompt_is_scored_once_however_many_choices_continue_it(tiny_server: Served, is_cached: bool) -> None:
    prompt = [3 + (7 * number + 101 * is_cached) % 400 for number in range(120)]
    if is_cached:
        tiny_server.complete(prompt, max_tokens=1)
    before = tiny_server.engine.loop.stats().num_step_tokens
    body = {"prompt": prompt, "n": 4, "seed": 3, "max_tokens": 4, "logprobs": 1, "echo": True}
    choices = tiny_server.complete(**body)["choices"]
    computed = tiny_server.engine.loop.stats().num_step_tokens - before
    alone = tiny_server.complete(**{**body, "n": 1, "seed": 5})["choices"][0]
    chunks = [chunk["choices"][0] for chunk in tiny_server.stream(COMPLETIONS, **body)]

    # once whole, and of the others what is not in full blocks
    assert computed <= 120 + 3 * 16 + 4 * 4
    assert choices[2] == alone | {"index": 2}
    for choice in choices:
        reports = [chunk["logprobs"] for chunk in chunks if chunk["index"] == choice["index"] and chunk["logprobs"]]
        assert [value for one in reports for value in one["token_logprobs"]] == choice["logprobs"]["token_logprobs"]


def test_what_the_logits_of_a_scored_prompt_took_is_given_back(
    module_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(aside, "TRIM_S", 0.0)
    monkeypatch.setattr(aside, "give_back", lambda: given.append(1))
    module_server.complete("a")
    module_server.complete("a", echo=True, logprobs=1)
    until(lambda: bool(given))

    assert given == [1]


def test_prompt_logprobs_are_not_streamed(module_server: Served) -> None:
    assert (
        "prompt_logprobs"
        in refusal(module_server.post(COMPLETIONS, prompt="a", prompt_logprobs=1, stream=True))["message"]
    )


def test_echo_is_not_for_a_chat(module_server: Served) -> None:
    messages = [{"role": "user", "content": "a"}]

    assert refusal(module_server.post(CHAT, messages=messages, echo=True))["param"] == "echo"


def test_several_prompts_as_token_ids_are_scored_as_an_evaluation_harness_asks(module_server: Served) -> None:
    answer = module_server.complete([[97, 98, 99], [100, 101]], max_tokens=1, logprobs=1, echo=True, temperature=0)

    assert [choice["text"] for choice in answer["choices"]] == ["abca", "ded"]
    for choice, length in zip(answer["choices"], (3, 2), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == length + 1
        assert all(isinstance(top, dict) for top in choice["logprobs"]["top_logprobs"][1:])
