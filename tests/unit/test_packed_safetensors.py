"""Packed weights of safetensors: every code against torch or the tables of the formats, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.weights import quant
from pocketllm.engine.weights.huggingface import packing
from pocketllm.engine.weights.huggingface.moving import moved, shape_of, type_of
from pocketllm.engine.weights.huggingface.quantization import Quantization, read_quantization
from pocketllm.engine.weights.huggingface.rules import Rule
from pocketllm.engine.weights.huggingface.safetensors import open_safetensors
from pocketllm.engine.weights.huggingface.sources import Source, read_sources
from pocketllm.errors import CheckpointError, UnsupportedFeatureError
from tests.parity.random_blocks import E2M1, e4m3
from tests.tiny_directory import write_safetensors


def values_of(source: Source) -> npt.NDArray[np.float32]:
    return quant.dequantize(source.read(), source.quant_type, source.shape)


def codes_of(values: int, *shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(values).integers(0, values, shape, dtype=np.uint8)


def sources_of(path: Path, tensors: Mapping[str, Any], said: Quantization | None = None) -> dict[str, Source]:
    """What a file with these tensors is read as; a pair names the element type of bytes."""
    file = write_safetensors(path / "model.safetensors", tensors)
    return read_sources([open_safetensors(file)], said or Quantization())


def test_every_8_bit_float_is_torchs(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    for scale in (1.0, -0.37, 0.0, 3e38):
        read = sources_of(tmp_path, {"a.weight": ("F8_E4M3", codes), "a.weight_scale": np.float32([scale])})
        with np.errstate(all="ignore"):
            expected = e4m3(codes) * np.float32(scale)

        np.testing.assert_array_equal(values_of(read["a.weight"]), expected)
        assert np.isnan(values_of(read["a.weight"])).sum() == 2  # 0x7f and 0xff


def test_every_4_bit_float_times_every_exponent_is_the_formats_product(tmp_path: Path) -> None:
    codes = np.tile(np.arange(0, 256, 17, dtype=np.uint8), (255, 1))  # 0x00, 0x11, …: each value twice
    exponents = np.arange(255, dtype=np.uint8)[:, None]
    read = sources_of(tmp_path, {"a.weight_packed": codes, "a.weight_scale": exponents})["a.weight"]
    exact = E2M1.repeat(2).astype(np.float64) * 2.0 ** (np.arange(255)[:, None] - 127)
    powers = torch.from_numpy(exponents).view(torch.float8_e8m0fnu).double().numpy()

    assert read.quant_type == "MXFP4"
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values_of(read), exact.astype(np.float32))
    np.testing.assert_array_equal(packing.exponent_scales(exponents), powers.astype(np.float32))
    assert np.isnan(packing.exponent_scales(np.array([255], np.uint8)))


@pytest.mark.parametrize("cols", [64, 16])
@pytest.mark.parametrize("shared", [1.0, -2.5, 1e-3, 0.0])
def test_every_4_bit_float_times_every_scale_of_16_is_the_formats_product(
    shared: float, cols: int, tmp_path: Path
) -> None:
    scales = np.arange(256, dtype=np.uint8).reshape(-1, cols // 16)
    codes = np.tile(np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.uint8([1, 16]), (len(scales), cols // 16))
    tensors = {"a.weight": codes, "a.weight_scale": ("F8_E4M3", scales), "a.weight_scale_2": np.float32(shared)}
    read = sources_of(tmp_path, tensors)["a.weight"]
    expected = (e4m3(scales) * np.float32(shared))[..., None] * E2M1

    assert read.quant_type == ("NVFP4_SCALED" if cols == 64 else "F32")
    np.testing.assert_array_equal(values_of(read), expected.reshape(len(scales), cols))


def test_a_global_scale_multiplies_or_divides_as_its_name_says(tmp_path: Path) -> None:
    codes, scales = codes_of(256, 3, 32), ("F8_E4M3", codes_of(120, 3, 4))
    multiplied = {"a.weight": codes, "a.weight_scale": scales, "a.weight_scale_2": np.float32(0.25)}
    divided = {"a.weight_packed": codes, "a.weight_scale": scales, "a.weight_global_scale": np.float32([4.0])}

    one, other = (values_of(sources_of(tmp_path, tensors)["a.weight"]) for tensors in (multiplied, divided))
    np.testing.assert_array_equal(one, other)
    assert one.any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 5).flatmap(lambda n: st.sampled_from([64 * n, 48 * n, 10 * n + 1])),
    tile=st.tuples(st.sampled_from([1, 3, 16, 128]), st.sampled_from([32, 64, 128, 500])),
    seed=st.integers(0, 99),
)
def test_a_tile_that_is_cut_off_at_an_edge_has_its_own_scale(
    rows: int, cols: int, tile: tuple[int, int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 127, (rows, cols), dtype=np.uint8)
    scales = random.normal(0, 1, (-(-rows // tile[0]), -(-cols // tile[1]))).astype(np.float32)
    tensors = {"a.weight": ("F8_E4M3", codes), "a.weight_scale_inv": scales}
    read = sources_of(tmp_path_factory.mktemp("tiles"), tensors, Quantization("fp8", tile))["a.weight"]
    spread = scales.repeat(tile[0], 0)[:rows].repeat(tile[1], 1)[:, :cols]

    np.testing.assert_array_equal(values_of(read), e4m3(codes) * spread)
    assert read.quant_type == ("FP8" if cols % 64 == 0 and (tile[1] % 64 == 0 or tile[1] >= cols) else "F32")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1)])
def test_a_scale_may_be_of_the_tensor_or_of_each_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    codes, scales = codes_of(127, 6, 64), np.random.default_rng(1).normal(0, 1, shape).astype(np.float16)
    read = sources_of(tmp_path, {"a.weight": ("F8_E4M3", codes), "a.weight_scale": scales, "a.input_scale": scales})

    assert list(read) == ["a.weight"]
    np.testing.assert_array_equal(values_of(read["a.weight"]), e4m3(codes) * scales.astype("f4").reshape(-1, 1))


def test_tiles_scaled_by_powers_of_two_are_read(tmp_path: Path) -> None:
    codes, exponents = codes_of(127, 200, 192), codes_of(140, 2, 2)
    tensors = {"a.weight": ("F8_E4M3", codes), "a.weight_scale_inv": ("F8_E8M0", exponents)}
    read = sources_of(tmp_path, tensors, Quantization("fp8", (128, 128)))["a.weight"]
    scales = np.exp2(exponents.astype(np.float32) - 127)

    np.testing.assert_array_equal(values_of(read), e4m3(codes) * scales.repeat(128, 0)[:200].repeat(128, 1)[:, :192])


def test_a_matrix_and_its_scales_may_lie_in_two_shards(tmp_path: Path) -> None:
    codes, scales = codes_of(127, 6, 64), np.random.default_rng(1).normal(0, 1, (6, 1)).astype(np.float32)
    files = [
        open_safetensors(write_safetensors(tmp_path / "1.safetensors", {"a.weight": ("F8_E4M3", codes)})),
        open_safetensors(write_safetensors(tmp_path / "2.safetensors", {"a.weight_scale": scales})),
    ]
    [source] = read_sources(files, Quantization()).values()

    assert source.file is files[0]
    np.testing.assert_array_equal(values_of(source), e4m3(codes) * scales)
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'a\.weight_scale' is in 2\.safetensors already"):
        read_sources([*files, files[1]], Quantization())


CODES = ("F8_E4M3", np.ones((4, 64), np.uint8))
NIBBLES = np.ones((4, 32), np.uint8)
SCALES_OF_16 = ("F8_E4M3", np.ones((4, 4), np.uint8))
BROKEN: Mapping[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"a.weight": CODES}, "no scales beside it"),
    "a scale of another shape": ({"a.weight": CODES, "a.weight_scale": np.ones(3, "f4")}, "has shape [3], but"),
    "tiles that nothing announces": (
        {"a.weight": CODES, "a.weight_scale_inv": np.ones((2, 2), "f4")},
        "has shape [2, 2], but the scales of 'a.weight' must have shape [4] or [4, 1]",
    ),
    "three axes": ({"a.weight": ("F8_E4M3", np.ones((2, 4, 64), np.uint8)), "a.weight_scale": np.ones(1, "f4")}, "are"),
    "bytes without a global scale": ({"a.weight_packed": NIBBLES, "a.weight_scale": SCALES_OF_16}, "element type U8"),
    "half a group": (
        {"a.weight_packed": np.ones((4, 20), np.uint8), "a.weight_scale": np.ones((4, 1), np.uint8)},
        "no whole groups of 32",
    ),
    "a division by nothing": (
        {"a.weight_packed": NIBBLES, "a.weight_scale": SCALES_OF_16, "a.weight_global_scale": np.zeros(1, "f4")},
        "it must be a finite number, and divide by none",
    ),
    "a global scale that is no number": (
        {"a.weight": NIBBLES, "a.weight_scale": SCALES_OF_16, "a.weight_scale_2": np.float32(np.nan)},
        "is nan: it must be a finite number",
    ),
    "an exponent that is no number": (
        {"a.weight_packed": NIBBLES, "a.weight_scale": np.full((4, 2), 255, np.uint8)},
        "no number (E8M0 code 255)",
    ),
    "a weight both plain and packed": (
        {"a.weight": np.ones((4, 64), "f4"), "a.weight_packed": NIBBLES, "a.weight_scale": np.ones((4, 2), np.uint8)},
        "tensors 'a.weight' and 'a.weight_packed' would both be the weight",
    ),
    "blocks of another size": (
        {"a_blocks": np.ones((2, 4, 2, 8), np.uint8), "a_scales": np.ones((2, 4, 2), np.uint8)},
        "must end in 16 bytes",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_codes_that_stand_for_nothing_are_refused_in_a_sentence(damage: str, tmp_path: Path) -> None:
    tensors, sentence = BROKEN[damage]
    with pytest.raises(CheckpointError) as caught:
        [source.read() for source in sources_of(tmp_path, tensors).values()]
    assert sentence in str(caught.value)


# -- what is done to rows and columns ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("run", "quant_type"), [(64, "FP8"), (128, "FP8"), (32, "F32"), (1, "F32")])
def test_columns_move_with_their_blocks_or_are_decoded_first(run: int, quant_type: str, tmp_path: Path) -> None:
    codes, scales = codes_of(127, 5, 384), np.random.default_rng(2).normal(0, 1, (5, 1)).astype(np.float32)
    [source] = sources_of(tmp_path, {"a.weight": ("F8_E4M3", codes), "a.weight_scale": scales}).values()
    order = np.random.default_rng(3).permutation(384 // run)
    rule = Rule("b", np.arange(5)[::-1], (order[:, None] * run + np.arange(run)).ravel())

    assert type_of(source, rule) == quant_type
    found = quant.dequantize(moved(source, rule, quant_type), quant_type, shape_of(source, rule))
    assert rule.columns is not None
    np.testing.assert_array_equal(found, values_of(source)[::-1][:, rule.columns])


def test_columns_that_change_places_within_a_block_are_decoded_first(tmp_path: Path) -> None:
    tensors = {"a.weight": ("F8_E4M3", codes_of(127, 5, 128)), "a.weight_scale": np.float32([0.5])}
    [source] = sources_of(tmp_path, tensors).values()
    order = np.arange(128).reshape(2, 64)
    order[:, 1:] = order[:, :0:-1]
    rule = Rule("b", columns=order.ravel())

    assert type_of(source, rule) == "F32"
    found = moved(source, rule, "F32").view(np.float32).reshape(5, 128)
    np.testing.assert_array_equal(found, values_of(source)[:, order.ravel()])


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_what_lies_in_turn_or_transposed_is_taken_apart(kind: str, tmp_path: Path) -> None:
    if kind == "plain":
        stored = np.random.default_rng(4).normal(0, 1, (3, 32, 10)).astype(np.float32)
        [source], values = sources_of(tmp_path, {"a": stored}).values(), stored.swapaxes(1, 2)
    else:
        tensors = {"a_blocks": codes_of(256, 3, 10, 2, 16), "a_scales": codes_of(130, 3, 10, 2)}
        [source] = sources_of(tmp_path, tensors).values()
        values = values_of(source)
    for first in (0, 1):
        rule = Rule("b", transposed=kind == "plain", share=slice(first, None, 2))
        found = quant.dequantize(moved(source, rule, source.quant_type), source.quant_type, shape_of(source, rule))

        np.testing.assert_array_equal(found, values[:, first::2])


# -- quantization_config -----------------------------------------------------------------------------------------------
def compressed(stored_as: Any = "float-quantized", **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "num_bits": 8, **weights}}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"a": group}}


def test_a_config_says_which_tiles_share_a_scale() -> None:
    assert read_quantization(None) == Quantization()
    assert read_quantization({"quant_method": "mxfp4"}).tile is None
    assert read_quantization({"quant_method": "fp8", "weight_block_size": [64, 32]}).tile == (64, 32)
    assert read_quantization({"quant_method": "fp8", "weight_block_size": None}).tile is None
    assert read_quantization(compressed(strategy="block", block_structure=[128, 64])).tile == (128, 64)
    assert read_quantization({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}).tile is None


REFUSED: Mapping[str, tuple[Any, str]] = {
    "another method": ({"quant_method": "awq"}, "quant_method 'awq', which is not read (read are fp8, mxfp4"),
    "no method": ({}, "quant_method None"),
    "no object": ([], "quant_method None"),
    "another 8-bit float": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    "4-bit experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    "a tile that is none": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
    "whole numbers": (compressed("pack-quantized", type="int"), "format 'pack-quantized'"),
    "whole numbers as they are": (compressed(type="int"), "weights of type 'int'"),
    "zero points": (compressed(symmetric=False), "read are symmetric floats"),
    "8 bits by group": (compressed(strategy="group", group_size=32), "8-bit weights by group"),
    "sparse": (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "rotated": (compressed() | {"transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
    "another algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_cannot_be_followed_is_refused_by_name(what: str) -> None:
    said, sentence = REFUSED[what]
    with pytest.raises(UnsupportedFeatureError, match=r"convert the model to GGUF") as caught:
        read_quantization(said)
    assert sentence in str(caught.value)
