"""x86 instruction sets with fused multiply-add give the same bits: a golden recorded on one holds on the others."""

from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.backends.cpu.ops import numerics_version
from tests.native import cpu_ops, usable_isas
from tests.parity.drive import Driver, Float32Array, chunks

ORACLES = Path(__file__).parents[1] / "oracles"
FUSED = [isa for isa in usable_isas() if isa in ("avx512vnni", "avx512", "avxvnni", "avx2")]
PROMPT = np.random.default_rng(11).integers(0, 512, 150).tolist()


def logits(name: str, isa: str, activation_dtype: str) -> Float32Array:
    """Of every position of one prompt: a long chunk, then single tokens."""
    driver = Driver(ORACLES / f"{name}.gguf", ops=cpu_ops(2, isa=isa, activation_dtype=activation_dtype))
    return driver.run([PROMPT], [*chunks(142, 142), *chunks(8, 1)])[0]


@pytest.mark.parametrize("activation_dtype", ["int8", "mixed", "int16", "float32"])
@pytest.mark.parametrize("name", ["q_Q4_1", "q_Q4_K", "q_Q6_K", "q_Q8_0", "llama"])
def test_what_goes_by_one_numerics_version_has_the_same_bits(name: str, activation_dtype: str) -> None:
    if len(FUSED) < 2:
        pytest.skip(f"one-instruction-set: this processor has only {', '.join(FUSED) or 'portable'}")
    best, *others = FUSED
    expected = logits(name, best, activation_dtype)

    for isa in others:
        assert numerics_version(isa, activation_dtype, "float16") == numerics_version(best, activation_dtype, "float16")
        np.testing.assert_array_equal(logits(name, isa, activation_dtype), expected, err_msg=f"{isa} and {best}")


def test_without_fused_multiply_add_the_numerics_are_named_otherwise() -> None:
    assert numerics_version("portable", "int8", "float16") != numerics_version("neon", "int8", "float16")
