"""Entries of groups and attention over them on the CUDA backend, in Triton's interpreter on the CPU."""

from importlib.util import find_spec

import pytest

from tests.cuda.interpreter import in_interpreter


@pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
@pytest.mark.parametrize(
    "parts",
    [("entries", "rotations", "windows"), pytest.param(("more_windows", "spare"), marks=pytest.mark.full)],
    ids="-".join,
)
def test_groups_of_tokens_agree_with_the_reference(parts: tuple[str, ...]) -> None:
    answer = in_interpreter("tests.cuda.compressed", *parts, timeout_s=900)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [f"{part} agrees" in answer.stdout for part in parts] == [True] * len(parts)
