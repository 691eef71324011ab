"""Tiny checkpoints of whole families on the CUDA backend, in Triton's interpreter on the CPU, held to their oracles."""

from importlib.util import find_spec

import pytest

from pocketllm.engine.backends.cuda.device import OPS
from pocketllm.engine.models.registry import find_family
from tests.cuda.interpreter import in_interpreter

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
FULL = pytest.mark.full
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "olmo2", "gemma2", "gemma3", "gemma4", "gpt-oss", "mimo2")
FAMILIES += ("minimax-m2", "lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "glm5-next", "deepseek4")


@needs_triton
@pytest.mark.parametrize(
    "names",
    [
        ("lfm2:8", "qwen3_5_text:7"),
        pytest.param(("gemma2", "gemma4_text", "gemma4_mixture", "olmo2", "smollm3", "mimo_v2_flash"), marks=FULL),
        pytest.param(("gpt_oss", "lfm2_four_taps", "lfm2moe", "qwen3_next", "qwen35moe"), marks=FULL),
        pytest.param(("folded_PTQ1_0:6", "folded_PQ2_0:6"), marks=FULL),
        pytest.param(("qwen4_exp_text",), marks=FULL),
        pytest.param(("glm5_next:20", "glm5_next_tight_limits:20", "glm5_next_unbounded:20"), marks=FULL),
        pytest.param(("deepseek4_tight_limits:24", "deepseek_v4:20"), marks=FULL),
    ],
    ids=" ".join,
)
def test_families_agree_with_their_oracles_in_pieces_token_by_token_and_beside_others(names: tuple[str, ...]) -> None:
    answer = in_interpreter("tests.cuda.families", *names, timeout_s=900)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("agrees") == len(names)


@needs_triton
@FULL
def test_five_sequences_at_once_agree_with_the_oracle_with_either_cache() -> None:
    answer = in_interpreter("tests.cuda.together", "glm5_next:18", timeout_s=900)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "glm5_next agrees" in answer.stdout


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_backend_has_what_the_family_asks_for(architecture: str) -> None:
    capability = find_family(architecture).capability

    assert capability.required_ops.union(*capability.ops_of_keys.values()) <= OPS
