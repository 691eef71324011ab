"""Recurrent layers on the CUDA backend, in Triton's interpreter on the CPU, held to the reference backend."""

from importlib.util import find_spec

import pytest

from tests.cuda.interpreter import in_interpreter

PARTS = ("convolutions", "chunks", "rotations", "copies")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")


@needs_triton
@pytest.mark.parametrize("parts", [PARTS, pytest.param(("rules",), marks=pytest.mark.full)], ids="-".join)
def test_states_and_what_is_read_of_them_agree_with_the_reference(parts: tuple[str, ...]) -> None:
    answer = in_interpreter("tests.cuda.recurrent", *parts, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [f"{part} agrees" in answer.stdout for part in parts] == [True] * len(parts)


@needs_triton
@pytest.mark.parametrize("part", ["rule", pytest.param("rules", marks=pytest.mark.full)])
def test_kimi_s_delta_rule_agrees_with_the_reference(part: str) -> None:
    answer = in_interpreter("tests.cuda.kimi", part, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{part} agrees" in answer.stdout
