"""The known slowness: nothing when off, a share of each step when on, the same tokens, and said aloud in the plan."""

from pathlib import Path

import pytest

from pocketllm.engine.lifecycle import step_delay
from pocketllm.engine.lifecycle.request import FinishEvent, Request, TokenEvent
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.step_delay import SlowedRunner
from pocketllm.engine.lifecycle.steps.runner import Runner
from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import OptionError
from tests.fake_model import fake_loop


class Clock:
    """Time that passes by 1 ms a look, and by what a step adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_step_takes_its_share_longer(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock = Clock()
    monkeypatch.setattr(step_delay, "time", clock)
    loop, _, model = fake_loop()
    loop._steps.runner = SlowedRunner(loop._steps.runner, share, lambda: None)
    told_s: list[float] = []
    loop.submit(Request("a", (1, 2), SamplingParams(max_tokens=2)), lambda event: told_s.append(clock.now))
    forward = model.forward

    def ten_seconds(*parts: object) -> object:
        clock.now += 10.0
        return forward(*parts)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(model, "forward", ten_seconds)
    loop.step()

    assert clock.now == pytest.approx(10.0 * (1 + share), rel=0.002)
    assert told_s == [clock.now], "the delay is in the time to the first token"


def answer(engine: Engine) -> list[int]:
    ids: list[int] = []
    ends: list[FinishEvent] = []

    def sink(event: object) -> None:
        if isinstance(event, TokenEvent):
            ids.append(event.token_id)
        elif isinstance(event, FinishEvent):
            ends.append(event)

    engine.loop.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)), sink)
    while not ends:
        engine.loop.step()
    return ids


def test_only_a_slowed_engine_has_the_other_runner_and_it_gives_the_same_tokens(tiny_gguf: Path) -> None:
    with load_engine(EngineOptions(model=str(tiny_gguf), threads=1)) as engine:
        slowed = engine.sibling(test_step_delay=0.05)

        assert (type(engine.loop._steps.runner), type(slowed.loop._steps.runner)) == (Runner, SlowedRunner)
        assert answer(slowed) == answer(engine)
        assert slowed.plan.options["test_step_delay"] == 0.05
        assert any(note.startswith("SLOWED ON PURPOSE: test_step_delay") for note in slowed.plan.notes)
        assert not any("SLOWED" in note for note in engine.plan.notes)


def test_a_delay_that_means_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match=r"test_step_delay=-1.0 \(argument\) must be between 0 and 10"):
        EngineOptions(test_step_delay=-1.0)
