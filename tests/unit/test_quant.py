"""Decoding of quant types: bit-equal to the `gguf` package's numpy decoder."""

import itertools

import gguf
import numpy as np
import pytest

from pocketllm.engine.weights import quant
from pocketllm.engine.weights.quant_types import BY_ID, BY_NAME
from pocketllm.errors import CheckpointError, UnsupportedFeatureError
from tests.parity.random_blocks import HALVES, OF_SAFETENSORS, SINGLES, STORED, expected_values, set_scale

EXPECTED = STORED | OF_SAFETENSORS | {"F32"}


def blocks_of(quant_type: str, count: int, seed: int, scale: float | None = None) -> np.ndarray:
    """Random blocks whose scales are finite; `scale` sets all of them."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, quant.block_size(quant_type)[1]), dtype=np.uint8)
    set_scale(data, quant_type, rng.normal(0, 0.1, count) if scale is None else scale)
    return data


def assert_same_bits(data: np.ndarray, quant_type: str) -> None:
    elements, _ = quant.block_size(quant_type)
    found = quant.dequantize(data, quant_type, (len(data), elements))
    with np.errstate(all="ignore"):
        expected = data.view("<f4") if quant_type == "F32" else expected_values(data, quant_type)

    both_nan = np.isnan(found) & np.isnan(expected)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32)[~both_nan], expected.view(np.uint32)[~both_nan])


def test_the_decodable_types_are_those_with_a_file() -> None:
    assert set(quant.known_types()) == EXPECTED


@pytest.mark.parametrize("quant_type", sorted(EXPECTED))
@pytest.mark.parametrize("count", [1, 3, 700])
def test_random_blocks_decode_to_the_oracles_bits(quant_type: str, count: int) -> None:
    assert_same_bits(blocks_of(quant_type, count, seed=count), quant_type)


@pytest.mark.parametrize("quant_type", sorted(EXPECTED))
def test_edge_blocks_decode_to_the_oracles_bits(quant_type: str) -> None:
    _, num_bytes = quant.block_size(quant_type)
    assert_same_bits(np.zeros((2, num_bytes), np.uint8), quant_type)
    assert_same_bits(np.full((2, num_bytes), 255, np.uint8), quant_type)
    for scale in (0.0, -0.0, -1.5, 6e-8, 65504.0, -65504.0, np.inf, np.nan):
        assert_same_bits(blocks_of(quant_type, 5, seed=7, scale=scale), quant_type)


def test_every_half_precision_value_decodes_exactly() -> None:
    every = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    assert_same_bits(every, "F16")
    assert_same_bits(every, "BF16")


@pytest.mark.parametrize("quant_type", sorted({*HALVES, *SINGLES}))
def test_a_change_of_any_byte_is_seen(quant_type: str) -> None:
    data = blocks_of(quant_type, 1, seed=3, scale=1.0)
    elements, num_bytes = quant.block_size(quant_type)
    before = quant.dequantize(data, quant_type, (1, elements))
    for at in range(num_bytes):
        changed = data.copy()
        changed[0, at] ^= 0x11
        assert not np.array_equal(before, quant.dequantize(changed, quant_type, (1, elements))), at


@pytest.mark.parametrize(("quant_type", "scale_at"), [("PTQ1_0", 26), ("TQ1_0", 52)])
def test_every_group_of_base_3_digits_survives_its_byte(quant_type: str, scale_at: int) -> None:
    elements, num_bytes = quant.block_size(quant_type)
    first = 16 if quant_type == "PTQ1_0" else 32  # the first section's bytes, one digit of each after another
    for number, digits in enumerate(itertools.product((-1, 0, 1), repeat=5)):
        block = np.zeros((1, num_bytes), np.uint8)
        block[0, scale_at : scale_at + 2] = np.array([1.0], "<f2").view(np.uint8)
        block[0, 3] = (number * 256 + 242) // 243
        values = quant.dequantize(block, quant_type, (1, elements))[0]

        assert tuple(values[3 : 5 * first : first]) == digits


def test_a_zero_of_ptq1_0_has_no_sign() -> None:
    block = np.zeros((1, 28), np.uint8)
    block[0, :26] = 128  # digits 0, 0, 0 …: the middle of each fraction
    block[0, 26:] = np.array([-1.0], "<f2").view(np.uint8)
    values = quant.dequantize(block, "PTQ1_0", (1, 128))

    assert not values.any()
    assert not np.signbit(values).any()


def test_a_tensor_larger_than_a_chunk_decodes_like_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = blocks_of("Q4_K", 64, seed=1)
    whole = quant.dequantize(data, "Q4_K", (8, 2048))
    monkeypatch.setattr(quant, "CHUNK_ELEMENTS", 768)

    np.testing.assert_array_equal(whole, quant.dequantize(data, "Q4_K", (8, 2048)))


def test_shapes_that_the_bytes_cannot_have_are_refused() -> None:
    data = blocks_of("Q4_0", 4, seed=0)
    with pytest.raises(CheckpointError, match="72 bytes of Q4_0 cannot be a tensor of shape"):
        quant.dequantize(data, "Q4_0", (3, 32))
    with pytest.raises(CheckpointError, match="blocks of 32 values in 18 bytes"):
        quant.dequantize(data, "Q4_0", (8, 16))


@pytest.mark.parametrize("quant_type", ["Q8_K", "I32", "TYPE_250"])
def test_a_type_without_a_decoder_is_refused_with_the_known_ones(quant_type: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{quant_type} has no decoder; decodable are BF16, F16"):
        quant.dequantize(np.zeros(32, np.uint8), quant_type, (1, 32))


def test_an_unknown_layout_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="no quant type 'Q9'"):
        quant.block_size("Q9")


def test_the_table_of_sizes_agrees_with_the_gguf_package() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # an activation type, sized otherwise in the C code
            assert (BY_ID[kind.value].block_elements, BY_ID[kind.value].block_bytes) == tuple(sizes), kind.name
        assert BY_ID[kind.value].name == kind.name
    assert BY_NAME["PTQ1_0"].type_id == 143
