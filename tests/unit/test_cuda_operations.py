"""Cases of `op_latency` on the CUDA backend, made and called in Triton's interpreter on the CPU."""

from importlib.util import find_spec

import pytest

from tests.cuda.interpreter import in_interpreter


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
def test_every_operation_has_cases_that_can_be_called_and_torch_s_own_beside_them() -> None:
    answer = in_interpreter("tests.cuda.operations", "interpreted", timeout_s=300)

    assert answer.returncode == 0, answer.stdout + answer.stderr
