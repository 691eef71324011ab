from pathlib import Path

import pytest

from pocketllm.engine.lifecycle.null_model import null_loop, step_costs_s
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tiny_gguf: Path) -> Tokenizer:
    with open_checkpoint(tiny_gguf) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata)


@pytest.mark.parametrize(("is_drawn", "in_flight"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("width", [1, 8])
def test_the_cost_of_a_step_without_a_model_is_measured_step_by_step(
    tokenizer: Tokenizer, width: int, is_drawn: bool, in_flight: int
) -> None:
    costs_s = step_costs_s(tokenizer, width, num_steps=20, is_drawn=is_drawn, max_steps_in_flight=in_flight)

    assert len(costs_s) == 20
    assert min(costs_s) > 0


def test_steps_may_draw_as_they_are_told(tokenizer: Tokenizer) -> None:
    assert len(step_costs_s(tokenizer, 2, 5, SamplingParams(temperature=0.7, top_k=5, seed=1))) == 5


def test_a_width_without_room_is_not_measured_at_all(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError, match="not a decode step"):
        step_costs_s(tokenizer, 600, num_steps=2)


def test_the_null_loop_is_as_wide_as_asked(tokenizer: Tokenizer) -> None:
    assert null_loop(tokenizer, 3).stats().num_blocks == 3 * 256
