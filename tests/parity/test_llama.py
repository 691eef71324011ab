"""Family llama over the reference backend, held to implementations that nobody here wrote."""

from pathlib import Path

import numpy as np
import pytest

from tests.parity.drive import Driver, chunks, nmse
from tests.parity.transformers_oracle import SPECS
from tests.tiny import TinyLlama, textbook_logits, write_llama

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9
QUANT_TYPES = ["Q4_1", "Q8_0", "Q4_K", "Q6_K"]
SHAPES = {
    "queries share no key head": TinyLlama(seed=1, num_kv_heads=4),
    "three queries share a key head": TinyLlama(seed=2, num_heads=9, num_kv_heads=3, head_dim=8),
    "all queries share one key head": TinyLlama(seed=3, num_kv_heads=1),
    "heads wider than the hidden size": TinyLlama(seed=4, head_dim=40),
    "half of each head rotates": TinyLlama(seed=5, head_dim=24, rope_dim=12),
    "tied head and biases": TinyLlama(seed=6, tied=True, biases=True),
    "odd widths": TinyLlama(seed=7, hidden=60, intermediate=77, head_dim=10, num_heads=5, num_kv_heads=1),
    "linear scaling": TinyLlama(seed=8, scaling={"type": "linear", "factor": 3.0}),
    "a factor without a type is linear": TinyLlama(seed=9, scaling={"factor": 3.0}),
    "type none ignores the factor's absence": TinyLlama(seed=10, scaling={"type": "none"}),
    "llama 3.1 scaling": TinyLlama(seed=11, llama3=True, theta=500000.0),
    "yarn": TinyLlama(seed=12, head_dim=32, scaling={"type": "yarn", "factor": 16.0, "original_context_length": 24}),
    "one layer in half precision": TinyLlama(seed=13, num_layers=1, quant_type="F16"),
    "bfloat16": TinyLlama(seed=14, quant_type="BF16"),
    "quantized": TinyLlama(seed=15, quant_type="Q5_0"),
    "all layers see a window": TinyLlama(seed=16, metadata={"llama.attention.sliding_window": 9}),
}


@pytest.fixture(scope="module")
def llama(tiny_gguf: Path) -> Driver:
    return Driver(tiny_gguf)


@pytest.fixture(scope="module")
def oracle() -> dict[str, np.ndarray]:
    return dict(np.load(ORACLES / "llama.npz"))


@pytest.mark.parametrize("size", [48, 7, 1], ids=["one batch", "chunks of seven", "token by token"])
def test_logits_agree_with_transformers_however_the_prompt_is_chunked(
    llama: Driver, oracle: dict[str, np.ndarray], size: int
) -> None:
    llama.reset()
    [got] = llama.run([oracle["input_ids"].tolist()], chunks(48, size))

    assert nmse(got, oracle["logits"]) <= TOLERANCE


def test_logits_agree_with_transformers_in_a_ragged_batch_of_five(llama: Driver, oracle: dict[str, np.ndarray]) -> None:
    llama.reset()
    ids = oracle["input_ids"].tolist()
    lengths = [48, 31, 17, 5, 1]
    prompts = [ids[:length] for length in lengths]
    first = [(sequence, -(-length // 2)) for sequence, length in enumerate(lengths)]
    rest = [(sequence, length // 2) for sequence, length in reversed(list(enumerate(lengths))) if length > 1]
    got = llama.run(prompts, [first, rest])

    for part, length in zip(got, lengths, strict=True):
        assert nmse(part, oracle["logits"][:length]) <= TOLERANCE


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_a_quantized_file_agrees_with_transformers_on_the_weights_it_holds(quant_type: str) -> None:
    expected = np.load(ORACLES / f"q_{quant_type}.npz")
    [got] = Driver(ORACLES / f"q_{quant_type}.gguf").run([expected["input_ids"].tolist()], chunks(32, 32))

    assert nmse(got, expected["logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", SPECS)
def test_scaled_rope_biases_and_tied_heads_agree_with_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"llama_{name}.npz")
    path = write_llama(tmp_path / "tiny.gguf", SPECS[name])
    [got] = Driver(path).run([expected["input_ids"].tolist()], chunks(48, 20))

    assert nmse(got, expected["logits"]) <= TOLERANCE


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_other_shapes_agree_with_the_textbook_in_float64(shape: TinyLlama, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", shape)
    ids = np.random.default_rng(shape.seed).integers(0, 512, 40)
    [got] = Driver(path).run([ids.tolist()], chunks(40, 13))

    assert nmse(got, textbook_logits(path, ids)) <= TOLERANCE


def test_the_textbook_agrees_with_transformers(tiny_gguf: Path, oracle: dict[str, np.ndarray]) -> None:
    assert nmse(textbook_logits(tiny_gguf, oracle["input_ids"]), oracle["logits"]) <= TOLERANCE


def test_the_tolerance_is_tight_enough_to_see_a_wrong_rotation(tmp_path: Path) -> None:
    ids = np.arange(20, 60)
    right = textbook_logits(write_llama(tmp_path / "right.gguf", TinyLlama()), ids)
    path = write_llama(tmp_path / "wrong.gguf", TinyLlama(theta=10001.0))
    [wrong] = Driver(path).run([ids.tolist()], chunks(40, 40))

    assert nmse(wrong, right) > TOLERANCE


# -- the same bits, whatever stands beside a row --------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 5, 7, 13, 100])
def test_chunked_prefill_gives_the_bits_of_one_whole_prefill(llama: Driver, size: int) -> None:
    prompt = np.random.default_rng(size).integers(0, 512, 301).tolist()
    llama.reset()
    [whole] = llama.run([prompt], chunks(301, 301))
    llama.reset()
    [chunked] = llama.run([prompt], chunks(301, size))

    assert np.array_equal(chunked, whole)


def test_eight_sequences_together_give_the_bits_of_each_alone(llama: Driver) -> None:
    random = np.random.default_rng(8)
    prompts = [random.integers(0, 512, length).tolist() for length in (1, 9, 17, 40, 64, 65, 90, 150)]
    alone = []
    for prompt in prompts:
        llama.reset()
        alone += llama.run([prompt], chunks(len(prompt), 50))
    llama.reset()
    together = llama.run(prompts, random_steps([len(prompt) for prompt in prompts], random))

    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one, other)


def random_steps(lengths: list[int], random: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Steps in which sequences come and go, in changing order, with one to thirty tokens each."""
    left = dict(enumerate(lengths))
    steps = []
    while left:
        chosen = random.permutation(list(left))[: random.integers(1, len(left) + 1)]
        step = [(int(sequence), int(min(left[sequence], random.integers(1, 31)))) for sequence in chosen]
        for sequence, count in step:
            left[sequence] -= count
            if not left[sequence]:
                del left[sequence]
        steps.append(step)
    return steps


def test_what_a_block_held_before_does_not_leak_into_its_next_owner(llama: Driver) -> None:
    prompt = np.random.default_rng(4).integers(0, 512, 37).tolist()
    llama.reset()
    [clean] = llama.run([prompt], chunks(37, 37))
    llama.reset()
    for layer in (*llama.cache.keys, *llama.cache.values):
        layer.fill_(float("nan"))
    [used] = llama.run([prompt], chunks(37, 37))

    assert np.array_equal(used, clean)


def test_a_chunk_that_wants_no_logits_gives_none(llama: Driver) -> None:
    from dataclasses import replace

    llama.reset()
    batch = replace(llama.batch([[1, 2, 3]], [(0, 3)]), logit_rows=np.zeros(0, np.int32))

    assert llama.model.logits(llama.model.forward(batch, llama.cache)).shape == (0, 512)
