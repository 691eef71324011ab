"""Mixtures of experts on the CUDA backend, in Triton's interpreter on the CPU, held to the reference backend."""

from importlib.util import find_spec

import pytest

from pocketllm.engine.backends.cuda.device import OPS
from pocketllm.engine.models.families import minimax_m2, qwen3moe
from tests.cuda.interpreter import in_interpreter


@pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
@pytest.mark.parametrize(
    "parts", [("routes", "names", "unsure", "kinds", "limited", "steps"), ("many", "types", "handed_on")], ids="-".join
)
def test_mixtures_agree_with_the_reference_whatever_was_in_memory_and_every_time(parts: tuple[str, ...]) -> None:
    answer = in_interpreter("tests.cuda.mixtures", *parts, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [f"{part} agrees" in answer.stdout for part in parts] == [True] * len(parts)


def test_families_whose_layers_are_plain_but_for_their_experts_run_there() -> None:
    assert qwen3moe.FAMILY.capability.required_ops <= OPS
    assert minimax_m2.FAMILY.capability.required_ops <= OPS
