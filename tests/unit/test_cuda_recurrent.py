"""Recurrent layers on the CUDA backend, in Triton's interpreter on the CPU, held to the reference backend."""

from importlib.util import find_spec

import pytest

from tests.cuda.interpreter import in_interpreter

PARTS = ("convolutions", "chunks", "kimi", "rotations", "copies")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
@pytest.mark.parametrize("parts", [PARTS, pytest.param(("rules", "kimi_rules"), marks=pytest.mark.full)], ids="-".join)
def test_states_and_what_is_read_of_them_agree_with_the_reference(parts: tuple[str, ...]) -> None:
    answer = in_interpreter("tests.cuda.recurrent", *parts, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [f"{part} agrees" in answer.stdout for part in parts] == [True] * len(parts)
