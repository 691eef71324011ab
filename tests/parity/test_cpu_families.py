"""Every family over the CPU backend: captured, fed in several ways, held to the committed logits of transformers."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.backends.cpu.ops import CpuOps
from pocketllm.engine.models.registry import find_family, known_architectures
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.native import cpu_ops, family_ops, usable_isas
from tests.parity.drive import Driver, Float32Array, chunks, nmse
from tests.parity.test_llama import SHAPES, random_steps
from tests.parity.tiny_families import TinyFamily, write_family
from tests.tiny import TinyLlama, textbook_logits, write_llama

ORACLES = Path(__file__).parents[1] / "oracles"


def runs(path: Path) -> bool:
    """Whether the backend has every operation that the checkpoint's family needs; the plan refuses it otherwise."""
    with open_checkpoint(path) as checkpoint:
        return find_family(checkpoint.architecture).capability.ops_of(checkpoint.metadata) <= set(dir(CpuOps))


FAMILIES = sorted(path.stem for path in ORACLES.glob("*.gguf") if runs(path))
EXACT = {"activation_dtype": "float32", "kv_dtype": "float32"}
SETTINGS = {"float32": EXACT, "as the family needs": {}}
EIGHT_BITS = 1e-3
"""The squared error that rows of 8 bits may make, over the squared size of the logits."""
SIXTEEN_BITS = 1e-5
"""The same of rows of 16 bits, and of a cache in half precision."""
LARGER = {"gemma4_text": 3e-5, "glm_moe_dsa": EIGHT_BITS, "qwen35": 1e-4}
"""Of what delivers less: heads of 512 values, an index that picks other keys at a tie, states that keep errors."""
PACKED = sorted(set(known_architectures()) - {"llama"})  # that one has files of its own, of every quant type


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> dict[str, str]:
    return SETTINGS[request.param]


def tolerance(name: str, settings: dict[str, str]) -> float:
    """The error that a committed checkpoint may have; those named for their quant type are llama's, of 8 bits."""
    if settings == EXACT:
        return 1e-9
    return EIGHT_BITS if name.startswith("q_") else LARGER.get(name, SIXTEEN_BITS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1000, 7, 1], ids=["one batch", "chunks of seven", "token by token"])
def test_logits_agree_with_transformers_however_the_prompt_is_chunked(
    name: str, size: int, settings: dict[str, str]
) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    ids = expected["input_ids"].tolist()
    path = ORACLES / f"{name}.gguf"
    [got] = Driver(path, ops=family_ops(path, 2, **settings)).run([ids], chunks(len(ids), size))

    assert nmse(got, expected["logits"]) <= tolerance(name, settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers_in_a_ragged_batch(name: str, settings: dict[str, str]) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    ids = expected["input_ids"].tolist()
    lengths = [len(ids), 31, 17, 5, 1]
    first = [(sequence, -(-length // 2)) for sequence, length in enumerate(lengths)]
    rest = [(sequence, length // 2) for sequence, length in reversed(list(enumerate(lengths))) if length > 1]
    path = ORACLES / f"{name}.gguf"
    driver = Driver(path, ops=family_ops(path, 2, **settings))
    got = driver.run([ids[:length] for length in lengths], [first, rest])

    for part, length in zip(got, lengths, strict=True):
        assert nmse(part, expected["logits"][:length]) <= tolerance(name, settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_that_continues_on_the_blocks_of_another_gives_its_bits(name: str) -> None:
    ids = np.load(ORACLES / f"{name}.npz")["input_ids"].tolist()[:40]
    driver = Driver(ORACLES / f"{name}.gguf", ops=family_ops(ORACLES / f"{name}.gguf", 2))
    [cold] = driver.run([ids], chunks(len(ids), 40))
    driver.reset()
    driver.run([ids], [[(0, 16)]])
    driver.follow(0, 1)
    [_, warm] = driver.run([ids, ids], [[(1, len(ids) - 16)]])

    assert np.array_equal(warm, cold[16:])


@pytest.mark.parametrize(
    ("architecture", "quant_type"), list(zip(PACKED, cycle(("Q4_0", "Q5_1", "Q8_0", "MXFP4")), strict=False))
)
def test_packed_files_agree_with_the_reference_where_activations_are_floats(
    architecture: str, quant_type: str, tmp_path: Path
) -> None:
    spec = TinyFamily(architecture, 81, {"expert_feed_forward_length": 64}, quant_type=quant_type)
    path = write_family(tmp_path / "tiny.gguf", spec)
    ids = np.random.RandomState(8).randint(20, 512, 40).tolist()
    [expected] = Driver(path).run([ids], chunks(40, 40))
    [got] = Driver(path, ops=cpu_ops(2, **EXACT)).run([ids], chunks(40, 9))

    assert nmse(got, expected) <= 1e-9


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("architecture", PACKED)
def test_packed_files_of_other_seeds_are_inside_the_tolerance_with_the_activations_that_the_family_needs(
    architecture: str, quant_type: str, tmp_path: Path
) -> None:
    ids = np.random.RandomState(8).randint(20, 512, 40).tolist()
    bits = find_family(architecture).capability.activation_bits
    expected_error = EIGHT_BITS if bits == 8 else LARGER.get(architecture, SIXTEEN_BITS)
    for seed in (82, 83):
        spec = TinyFamily(architecture, seed, {"expert_feed_forward_length": 64}, quant_type=quant_type)
        path = write_family(tmp_path / f"{seed}.gguf", spec)
        [expected] = Driver(path).run([ids], chunks(40, 40))
        [got] = Driver(path, ops=family_ops(path, 2)).run([ids], chunks(40, 9))

        assert nmse(got, expected) <= expected_error


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("isa", usable_isas())
def test_other_shapes_agree_with_the_textbook_in_float64(shape: TinyLlama, isa: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", shape)
    ids = np.random.default_rng(shape.seed).integers(0, 512, 40)
    [got] = Driver(path, ops=cpu_ops(2, isa=isa, **EXACT)).run([ids.tolist()], chunks(40, 13))

    assert nmse(got, textbook_logits(path, ids)) <= 1e-9


@pytest.mark.parametrize("isa", usable_isas())
def test_narrow_caches_cost_what_their_rounding_does(isa: str, tiny_gguf: Path) -> None:
    oracle = np.load(ORACLES / "llama.npz")
    errors = []
    for kv_dtype in ("float32", "float16", "bfloat16", "int8"):
        ops = cpu_ops(2, activation_dtype="float32", kv_dtype=kv_dtype, isa=isa)
        [got] = Driver(tiny_gguf, ops=ops).run([oracle["input_ids"].tolist()], chunks(48, 5))
        errors.append(nmse(got, oracle["logits"]))

    assert errors == sorted(errors)
    assert errors[1] <= 1e-6
    assert errors[3] <= 1e-3


# -- the same bits, whatever stands beside a row ---------------------------------------------------------------------
@pytest.fixture(scope="module", params=usable_isas())
def driver(request: pytest.FixtureRequest) -> Driver:
    """A quantized model as it is run by default, the odd threads sharing rows unevenly."""
    path = ORACLES / "q_Q4_1.gguf"
    return Driver(path, ops=family_ops(path, 3, isa=request.param))


def alone(driver: Driver, prompt: list[int], size: int) -> Float32Array:
    driver.reset()
    return driver.run([prompt], chunks(len(prompt), size))[0]


@pytest.mark.parametrize("size", [1, 5, 7, 13, 100])
def test_chunked_prefill_gives_the_bits_of_one_whole_prefill(driver: Driver, size: int) -> None:
    prompt = np.random.default_rng(size).integers(0, 512, 301).tolist()

    assert np.array_equal(alone(driver, prompt, size), alone(driver, prompt, 301))


def test_eight_sequences_together_give_the_bits_of_each_alone(driver: Driver) -> None:
    random = np.random.default_rng(8)
    prompts = [random.integers(0, 512, length).tolist() for length in (1, 9, 17, 40, 64, 65, 90, 150)]
    expected = [alone(driver, prompt, 50) for prompt in prompts]
    driver.reset()
    together = driver.run(prompts, random_steps([len(prompt) for prompt in prompts], random))

    for one, other in zip(together, expected, strict=True):
        assert np.array_equal(one, other)


def test_the_number_of_threads_and_the_size_of_a_block_do_not_change_a_bit(driver: Driver) -> None:
    prompt = np.random.default_rng(1).integers(0, 512, 200).tolist()
    expected = alone(driver, prompt, 200)
    for threads, block_size in ((1, 16), (2, 32), (4, 5)):
        ops = family_ops(ORACLES / "q_Q4_1.gguf", threads, isa=driver.ops.isa)
        other = Driver(ORACLES / "q_Q4_1.gguf", block_size=block_size, ops=ops)

        assert np.array_equal(alone(other, prompt, 67), expected)


def test_captured_and_one_by_one_give_the_same_bits(driver: Driver) -> None:
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    driver.reset()
    batch = driver.batch(prompts, [(0, 5), (1, 3)])
    captured = np.array(driver.forward(batch))

    assert np.array_equal(driver.model.forward(batch, driver.cache), captured)


def test_what_a_block_held_before_does_not_leak_into_its_next_owner(driver: Driver) -> None:
    prompt = np.random.default_rng(4).integers(0, 512, 37).tolist()
    clean = alone(driver, prompt, 37)
    driver.reset()
    driver.cache.memory()[:] = 0xFF  # not a number, whatever the dtype
    [used] = driver.run([prompt], chunks(37, 37))

    assert np.array_equal(used, clean)


def test_a_chunk_that_wants_no_logits_gives_none(driver: Driver) -> None:
    from dataclasses import replace

    driver.reset()
    batch = replace(driver.batch([[1, 2, 3]], [(0, 3)]), logit_rows=np.zeros(0, np.int32))

    assert driver.model.logits(driver.forward(batch)).shape == (0, 512)
