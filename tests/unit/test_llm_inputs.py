"""What `LLM` and `AsyncLLM` are given: each mistake is one clear sentence, and never silence."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm import LLM, AsyncLLM, FinishEvent, SamplingParams
from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
CLOSED = "^this LLM is closed: make another$"


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> Iterator[Engine]:
    with load_engine(EngineOptions(model=str(tiny_gguf))) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm(engine: Engine) -> LLM:
    return LLM.from_engine(engine)


@pytest.fixture
def threaded(engine: Engine) -> Iterator[AsyncLLM]:
    sibling = engine.sibling()
    yield AsyncLLM.from_engine(sibling)
    sibling.close()


# -- prompts
def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    prompts: list[Any] = ["a", [5, 6]]
    expected = [result.token_ids for result in llm.generate(prompts, GREEDY)]

    several: Any = (prompt for prompt in prompts)
    assert [result.token_ids for result in llm.generate(several, GREEDY)] == expected
    one: Any = (token_id for token_id in [5, 6])
    assert [result.prompt_token_ids for result in llm.generate(one, GREEDY)] == [[5, 6]]
    params: Any = (GREEDY for _ in range(2))
    assert [result.token_ids for result in llm.generate(prompts, params)] == expected
    assert llm.generate([], GREEDY) == []


def test_an_error_inside_a_generator_of_prompts_stays_its_own(llm: LLM) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise TypeError("mine")

    prompts: Any = broken()
    with pytest.raises(TypeError, match="mine"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("prompts", [None, 5, object(), {"prompt": "hi"}])
def test_what_holds_no_prompts_is_refused_by_its_kind(llm: LLM, prompts: Any) -> None:
    kind = type(prompts).__name__
    with pytest.raises(RequestError, match=f"a prompt is a text or a list of token ids, .* not {kind}$") as refused:
        llm.generate(prompts, GREEDY)

    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [b"hi", bytearray(b"hi"), memoryview(b"hi")])
def test_bytes_are_no_token_ids(llm: LLM, prompt: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(prompt, GREEDY),
        lambda: llm.generate([prompt], GREEDY),
        lambda: llm.stream(prompt, GREEDY),
        lambda: llm.token_ids(prompt),
        lambda: llm.prompt_logits(prompt),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=rf"not {type(prompt).__name__}: decode bytes to a text first"):
            call()


@pytest.mark.parametrize("prompts", [[[True]], [True], [[5, False]], [np.array([True])]])
def test_a_bool_is_no_token_id(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="bool"):
        llm.generate(prompts, GREEDY)


# -- conversations
@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, ["hi"], [[5]], b"hi", [None]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="a conversation is a list of messages") as refused:
        llm.chat(messages, GREEDY)

    assert refused.value.param == "messages"


def test_conversations_may_come_from_a_generator(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Template:
        def render(self, messages: list[dict[str, str]]) -> str:
            return "".join(message["content"] for message in messages)

    monkeypatch.setattr(llm.engine, "chat_template", Template())
    one = [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]
    expected = llm.chat_token_ids(one)

    given: list[Any] = [iter(one), iter([one]), [iter(one)]]
    for several in given:
        [result] = llm.chat(several, GREEDY)
        assert result.prompt_token_ids == expected


# -- sampling parameters
@pytest.mark.parametrize("params", [{"max_tokens": 4}, {}, 5, "greedy", [{"max_tokens": 4}], [None], False])
def test_what_is_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(
        RequestError, match=r"give SamplingParams\(\.\.\.\), not (dict|int|str|NoneType|bool)$"
    ) as refused:
        llm.generate("hi", params)

    assert refused.value.param == "params"


@pytest.mark.parametrize("params", [{"max_tokens": 4}, {}, 0, [GREEDY]])
def test_a_stream_refuses_what_is_no_sampling_parameters(llm: LLM, threaded: AsyncLLM, params: Any) -> None:
    for stream in (llm.stream, threaded.stream):
        with pytest.raises(RequestError, match=r"give SamplingParams\(\.\.\.\), not (dict|int|list)$"):
            stream("hi", params)


# -- after close
def test_every_call_of_a_closed_llm_says_that_it_is_closed(engine: Engine) -> None:
    llm = LLM.from_engine(engine.sibling())
    begun = llm.stream([5], GREEDY)
    llm.close()
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("hi", GREEDY),
        lambda: llm.generate([], GREEDY),
        lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY),
        lambda: llm.stream("hi", GREEDY),
        lambda: next(begun),
        lambda: llm.prompt_logits("hi"),
        lambda: llm.token_ids("hi"),
        lambda: llm.chat_token_ids([{"role": "user", "content": "hi"}]),
        lambda: llm.__enter__(),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=CLOSED):
            call()
    assert not llm.cancel("mine")  # which a signal handler may call at any time
    llm.cancel_all()


def test_closing_an_llm_inside_its_generate_ends_it_with_that_sentence(engine: Engine) -> None:
    small = engine.sibling(max_num_seqs=1)
    small.loop._scheduler.limits = replace(small.loop._scheduler.limits, max_queued_requests=1)
    llm = LLM.from_engine(small)

    with pytest.raises(RequestError, match=CLOSED):
        llm.generate([[5]] * 4, GREEDY, on_event=lambda event: llm.close())


def test_a_stream_whose_llm_is_closed_ends_as_cancelled(engine: Engine) -> None:
    llm = LLM.from_engine(engine.sibling())
    events = llm.stream([5], GREEDY)
    next(events)
    llm.close()

    *_, last = events
    assert isinstance(last, FinishEvent)
    assert last.reason.value == "cancelled"


def test_every_call_of_a_closed_async_llm_says_that_it_is_closed(engine: Engine) -> None:
    llm = AsyncLLM.from_engine(engine.sibling())

    async def main() -> None:
        begun = llm.stream([5], GREEDY)
        await llm.close()
        await llm.close()
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("hi", GREEDY),
            lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY),
            lambda: anext(begun),
            lambda: llm.prompt_logits("hi"),
            lambda: llm.__aenter__(),
        ]
        for call in calls:
            with pytest.raises(RequestError, match=CLOSED):
                await call()
        for at_once in (lambda: llm.stream("hi", GREEDY), lambda: llm.token_ids("hi")):
            with pytest.raises(RequestError, match=CLOSED):
                at_once()

    asyncio.run(main())


def test_a_closed_engine_is_not_started_again_for_an_async_llm(engine: Engine) -> None:
    sibling = engine.sibling()
    sibling.close()

    with pytest.raises(RequestError, match=CLOSED):
        AsyncLLM.from_engine(sibling)
    assert not sibling.loop.is_running


# -- the model
def test_the_model_may_be_a_path(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, max_num_seqs=1) as llm:
        [expected] = llm.generate([[5]], GREEDY)

    async def main() -> list[int]:
        async with AsyncLLM(tiny_gguf, max_num_seqs=1) as threaded:
            [result] = await threaded.generate([[5]], GREEDY)
            return result.token_ids

    assert asyncio.run(main()) == expected.token_ids
