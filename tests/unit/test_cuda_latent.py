"""Latent attention and residual streams on the CUDA backend, in Triton's interpreter on the CPU."""

from importlib.util import find_spec

import pytest

from pocketllm.engine.backends.cuda.device import OPS
from pocketllm.engine.models.families import deepseek2, glm_dsa, xing4_0
from tests.cuda.interpreter import in_interpreter

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")


@needs_triton
def test_latent_attention_agrees_with_the_reference_whatever_was_in_memory_and_every_time() -> None:
    parts = ("heads", "attention", "selection", "pools", "streams", "oracles=deepseek_v2")
    answer = in_interpreter("tests.cuda.latent", *parts, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [f"{part} agrees" in answer.stdout for part in parts] == [True] * len(parts)


@needs_triton
@pytest.mark.full
def test_more_models_with_latents_give_the_logits_of_their_oracles() -> None:
    answer = in_interpreter(
        "tests.cuda.latent", "oracles=deepseek_v3,xing4_f32,xing4_iq4_nl,glm_moe_dsa", timeout_s=600
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_families_with_latents_run_there() -> None:
    assert deepseek2.FAMILY.capability.required_ops <= OPS
    assert glm_dsa.FAMILY.capability.required_ops <= OPS
    assert xing4_0.FAMILY.capability.required_ops <= OPS
