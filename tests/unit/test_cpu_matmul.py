"""Packed matrices of the native CPU backend: against the decoders of `weights/quant`, and float64 numpy.

Every usable instruction set is tested. Outputs are poisoned with NaN before each call.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.cpu.library import library_path, usable_isas
from pocketllm.engine.weights import quant
from pocketllm.engine.weights.bits import grid
from pocketllm.engine.weights.quant_types import BY_NAME
from tests.unit.test_quant import HALVES, blocks_of

if not library_path().exists():
    pytest.skip("native-library-missing: install a C++17 compiler and reinstall", allow_module_level=True)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT_TYPES = ("BF16", "F16", "F32")
TYPES = quant.known_types()
CODED_TYPES = tuple(sorted(set(TYPES) - {*FLOAT_TYPES, "FP8"}))
"""Those that meet quantized rows."""
E4M3_BYTES = {"FP8": 64, "NVFP4_SCALED": 4}
"""Bytes at the begin of a block that are 8-bit floats."""
ISAS = usable_isas()
GRIDS = {"IQ1_S": "IQ1_S", "IQ1_M": "IQ1_S", **{t: t for t in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")}}
SHAPES = ((1, 1), (3, 3), (17, 2), (33, 5))
"""(rows, blocks of a row)"""
TOKENS = (1, 2, 5, 8, 9, 33)
SCALES = [("d", "f4"), ("z", "f4"), ("sum", "f4"), ("sum_16", "f4", 2), ("minus_sum", "i4"), ("minus_sum_16", "i4", 2)]
BLOCKS = {
    "int8": np.dtype([("planes", "i1", (1, 32)), *SCALES]),
    "int16": np.dtype([("planes", "i1", (2, 32)), *SCALES]),
}
"""native/matmul/activations.h"""
KINDS = tuple(BLOCKS)
"""In the order of native/kernels.h, `Activations`."""
LARGEST = {"int8": 127, "int16": 127 * 255 + 127}
"""Of q."""
Rows = npt.NDArray[np.void]
"""Quantized rows: blocks of one of BLOCKS, [rows, blocks]."""


@cache
def library() -> Any:
    whole = ctypes.CDLL(str(library_path()))
    whole.pocketllm_group_bytes.restype = whole.pocketllm_quantized_bytes.restype = ctypes.c_int64
    whole.pocketllm_bytes_per_element.restype = ctypes.c_double
    return whole


def address(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def aligned(size: int) -> Bytes:
    whole = np.empty(size + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + size]


@dataclass
class Packed:
    """A matrix as the kernels read it, and as the decoder sees it."""

    quant_type: str
    groups: Bytes
    values: Floats

    @property
    def head(self) -> tuple[Any, ...]:
        return BY_NAME[self.quant_type].type_id, address(self.groups), *self.values.shape

    def row(self, isa: str, row: int) -> Floats:
        out = np.full(self.values.shape[1], np.nan, np.float32)
        assert library().pocketllm_decode_row(isa.encode(), *self.head, row, address(out))
        return out

    def multiply(
        self, isa: str, x: npt.NDArray[Any], bias: Floats | None = None, residual: Floats | None = None
    ) -> Floats:
        """x: quantized rows, or floats."""
        y = np.full((len(x), len(self.values)), np.nan, np.float32)
        rest = *self.head, address(x), len(x), address(bias), address(residual), address(y)
        if x.dtype == np.float32:
            assert library().pocketllm_matmul_f32(isa.encode(), *rest)
        else:
            assert library().pocketllm_matmul(isa.encode(), kind_of(x), *rest)
        return y


def matrix_data(quant_type: str, rows: int, cols: int, seed: int) -> Bytes:
    rng = np.random.default_rng(seed)
    if quant_type in FLOAT_TYPES:
        values = rng.normal(0, 1, (rows, cols)).astype(np.float32)
        if quant_type == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(quant_type.replace("F", "float")).view(np.uint8)
    data = blocks_of(quant_type, rows * cols // quant.block_size(quant_type)[0], seed)
    if quant_type == "MXFP4":
        data[:, 0] = rng.integers(0, 140, len(data))  # scales whose products stay finite
    floats = data[:, : E4M3_BYTES.get(quant_type, 0)]
    floats[floats & 0x7F == 0x7F] = 0  # what is no number would make every sum of its row none
    return data


def pack(quant_type: str, data: Bytes, rows: int, cols: int) -> Bytes:
    """Repacked in two calls, as threads share it; what no call writes is poisoned."""
    type_id, groups = BY_NAME[quant_type].type_id, (rows + 15) // 16
    points = np.ascontiguousarray(grid(GRIDS[quant_type])) if quant_type in GRIDS else None
    out = aligned(library().pocketllm_group_bytes(type_id, cols) * groups)
    out[:] = 0xFF
    for first, last in ((0, groups // 2), (groups // 2, groups)):
        done = library().pocketllm_repack(
            type_id, address(data), rows, cols, first, last, address(points), address(out)
        )
        assert done
    return out


@cache
def matrix(quant_type: str, rows: int, blocks: int, seed: int = 1) -> Packed:
    elements = quant.block_size(quant_type)[0]
    cols = elements * blocks if elements > 1 else 37 * blocks
    data = np.ascontiguousarray(matrix_data(quant_type, rows, cols, seed))
    return Packed(quant_type, pack(quant_type, data, rows, cols), quant.dequantize(data, quant_type, (rows, cols)))


def rows_of_floats(tokens: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 1, (tokens, cols)).astype(np.float32)


def kind_of(rows: Rows) -> int:
    return list(BLOCKS.values()).index(rows.dtype)


def quantized(isa: str, x: Floats, kind: str = "int8", norm: Floats | None = None, eps: float = 0.0) -> Rows:
    settings = isa.encode(), KINDS.index(kind)
    out = np.full((len(x), library().pocketllm_quantized_bytes(*settings, x.shape[1])), 0xFF, np.uint8)
    assert library().pocketllm_quantize(
        *settings, address(x), *x.shape, address(norm), ctypes.c_float(eps), address(out)
    )
    return out.view(BLOCKS[kind]).reshape(len(x), -1)


def integers_of(rows: Rows) -> npt.NDArray[np.int32]:
    """q of every block, of one plane or of two."""
    q = np.zeros((*rows.shape, 32), np.int32)
    for plane in range(rows["planes"].shape[-2]):
        q = 255 * q + rows["planes"][..., plane, :]
    return q


def values_of_rows(rows: Rows, cols: int) -> npt.NDArray[np.float64]:
    d, z = (rows[name][..., None].astype(np.float64) for name in ("d", "z"))
    return (integers_of(rows) * d + z).reshape(len(rows), -1)[:, :cols]


def error_of(found: Floats, x: npt.NDArray[Any], w: Floats) -> float:
    """Squared error of x · wᵀ over the squares of the terms' own size, so that no cancellation hides or makes one."""
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    size = x.astype(np.float64) ** 2 @ w.astype(np.float64).T ** 2
    return float(((found - expected) ** 2).sum() / size.sum())


def assert_same_bits(expected: Floats, found: Floats) -> None:
    np.testing.assert_array_equal(expected.view(np.uint32), found.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant_type", TYPES)
def test_a_row_decodes_to_the_bits_of_the_files_decoder(quant_type: str, isa: str) -> None:
    for shape in SHAPES:
        packed = matrix(quant_type, *shape)
        for row, expected in enumerate(packed.values):
            assert_same_bits(expected, packed.row(isa, row))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant_type", TYPES)
def test_edge_blocks_decode_to_the_bits_of_the_files_decoder(quant_type: str, isa: str) -> None:
    elements, num_bytes = quant.block_size(quant_type)
    cols = max(elements, 32)
    for fill in (0, 255, None):
        data = np.full((4 * cols // elements, num_bytes), fill or 0, np.uint8)
        if fill is None and quant_type not in FLOAT_TYPES:
            data = np.concatenate(
                [blocks_of(quant_type, len(data) // 4, 7, scale) for scale in (0.0, -0.0, 6e-8, 65504)]
            )
        packed = Packed(quant_type, pack(quant_type, data, 4, cols), quant.dequantize(data, quant_type, (4, cols)))
        for row, expected in enumerate(packed.values):
            number = ~np.isnan(expected)

            assert_same_bits(expected[number], packed.row(isa, row)[number])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant_type", CODED_TYPES)
def test_products_with_quantized_rows_are_right_and_do_not_depend_on_the_batch(
    quant_type: str, kind: str, isa: str
) -> None:
    for shape in SHAPES:
        packed = matrix(quant_type, *shape)
        x = quantized(isa, rows_of_floats(max(TOKENS), packed.values.shape[1]), kind)
        alone = np.concatenate([packed.multiply(isa, x[row : row + 1]) for row in range(len(x))])

        assert error_of(alone, values_of_rows(x, packed.values.shape[1]), packed.values) < 2e-13
        for tokens in TOKENS:
            assert_same_bits(alone[:tokens], packed.multiply(isa, x[:tokens]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant_type", TYPES)
def test_products_with_float_rows_are_right_and_do_not_depend_on_the_batch(quant_type: str, isa: str) -> None:
    for shape in SHAPES:
        packed = matrix(quant_type, *shape)
        x = rows_of_floats(max(TOKENS), packed.values.shape[1])
        alone = np.concatenate([packed.multiply(isa, x[row : row + 1]) for row in range(len(x))])

        assert error_of(alone, x, packed.values) < 2e-13
        for tokens in TOKENS:
            assert_same_bits(alone[:tokens], packed.multiply(isa, x[:tokens]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant_type", ["Q4_1", "Q5_1", "Q8_0", "IQ4_NL", "IQ3_XXS"])
def test_the_largest_codes_and_activations_do_not_saturate(quant_type: str, kind: str, isa: str) -> None:
    elements, num_bytes = quant.block_size(quant_type)
    cols = max(elements, 64)
    for fill in (0x00, 0x80, 0x7F, 0xFF):
        data = np.full((17 * cols // elements, num_bytes), fill, np.uint8)
        for at in HALVES[quant_type]:
            data[:, at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
        packed = Packed(quant_type, pack(quant_type, data, 17, cols), quant.dequantize(data, quant_type, (17, cols)))
        for sign in (1, -1):
            floats = np.full((9, cols), sign, np.float32)
            floats[:, 9::32] = -sign
            x = quantized(isa, floats, kind)
            assert (np.abs(integers_of(x)[:, : cols // 32]) == LARGEST[kind]).all()
            expected = values_of_rows(x, cols) @ packed.values.T.astype(np.float64)

            np.testing.assert_allclose(packed.multiply(isa, x), expected, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("quant_type", "kind"), [("Q4_K", "int8"), ("Q4_K", "int16"), ("F16", "float32")])
def test_more_rows_than_a_tile_of_any_kind_give_each_rows_own_bits(quant_type: str, kind: str, isa: str) -> None:
    packed = matrix(quant_type, 19, 9)
    x: npt.NDArray[Any] = rows_of_floats(300, packed.values.shape[1])
    if kind in KINDS:
        x = quantized(isa, x, kind)
    together = packed.multiply(isa, x)
    for row in (0, 63, 64, 255, 256, 299):
        assert_same_bits(packed.multiply(isa, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [3, 16, 21])
def test_a_bias_and_a_residual_are_added_to_whole_sums(rows: int, isa: str) -> None:
    packed = matrix("Q5_1", rows, 3)
    floats = rows_of_floats(9, packed.values.shape[1])
    bias, residual = rows_of_floats(1, rows, 2)[0], rows_of_floats(9, rows, 3)
    for x in (floats, quantized(isa, floats), quantized(isa, floats, "int16")):
        plain = packed.multiply(isa, x)

        assert_same_bits(plain + bias, packed.multiply(isa, x, bias))
        assert_same_bits(plain + residual, packed.multiply(isa, x, None, residual))
        assert_same_bits((plain + bias) + residual, packed.multiply(isa, x, bias, residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [32, 64, 96, 576])
def test_rows_are_quantized_to_the_nearest_step_between_the_ends_of_each_32(cols: int, kind: str, isa: str) -> None:
    x = rows_of_floats(8, cols)
    x[1, :32], x[2, 0], x[3, :32] = 0, 1e4, -7.3
    x[4, :32] = np.float32(3) + np.arange(32, dtype=np.float32) * np.float32(2**-22)  # neighbors
    x[5] = np.abs(x[5])
    x[6, :2] = 3.4e38, -3.4e38
    blocks = quantized(isa, x, kind)
    q, most = integers_of(blocks), np.float32(LARGEST[kind])
    parts = x.reshape(8, -1, 32)
    least, largest = parts.min(axis=-1, keepdims=True), parts.max(axis=-1, keepdims=True)
    middle = np.float32(0.5) * least + np.float32(0.5) * largest
    reach = np.maximum(largest - middle, middle - least)
    with np.errstate(divide="ignore"):
        expected = np.rint((parts - middle) * np.where(reach > 0, most / reach, np.float32(0)))

    count = cols // 32
    np.testing.assert_array_equal(expected, q[:, :count])
    np.testing.assert_array_equal(reach[..., 0] / most, blocks["d"][:, :count])
    np.testing.assert_array_equal(middle[..., 0], blocks["z"][:, :count])
    sums = q.sum(axis=-1, dtype=np.int32)
    halves = q.reshape(8, -1, 2, 16).sum(axis=-1, dtype=np.int32)
    np.testing.assert_array_equal((sums, -sums), (blocks["sum"], blocks["minus_sum"]))
    np.testing.assert_array_equal((halves, -halves), (blocks["sum_16"], blocks["minus_sum_16"]))
    for name in ("planes", "d", "z"):
        assert not blocks[name][:, count:].any()


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_32_numbers_come_back_within_half_a_step(values: list[float]) -> None:
    x = np.array([values], np.float32)
    for isa, kind in product(ISAS, KINDS):
        rows = quantized(isa, x, kind)
        steps = float(rows["d"][0, 0])
        whole = float(x.max()) - float(x.min())
        assert steps <= whole / (2 * LARGEST[kind]) * 1.01 + np.abs(x).max() * 1e-9 + 1e-30
        assert (np.abs(values_of_rows(rows, 32) - x) <= 0.5001 * steps + 2e-7 * np.abs(x).max() + 1e-30).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [32, 160, 576])
def test_rows_are_normed_on_their_way(cols: int, kind: str, isa: str) -> None:
    x, weight = rows_of_floats(4, cols) * 3, rows_of_floats(1, cols, 5)[0]
    exact = x.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    rows = quantized(isa, x, kind, weight, 1e-5)
    steps = rows["d"].repeat(32, axis=1)[:, :cols]

    assert (np.abs(values_of_rows(rows, cols) - normed) <= 0.5001 * steps + 4e-7 * np.abs(normed) + 1e-7).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_not_hidden(bad: float, kind: str, isa: str) -> None:
    packed = matrix("Q4_1", 17, 3)
    x = rows_of_floats(3, packed.values.shape[1])
    x[1, 40] = bad
    rows = quantized(isa, x, kind)
    found = packed.multiply(isa, rows)

    assert not np.isfinite(found[1]).any()
    assert np.isfinite(found[[0, 2]]).all()
    assert not integers_of(rows)[1, 1].any()
    assert not rows[1, 1]["minus_sum"]
    assert not rows[1, 1]["minus_sum_16"].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant_type", ["Q4_1", "Q4_0", "Q6_K", "Q2_K"])
def test_what_all_of_a_row_has_in_common_costs_no_accuracy(quant_type: str, isa: str) -> None:
    packed = matrix(quant_type, 33, 5)
    x = rows_of_floats(9, packed.values.shape[1])
    plain = error_of(packed.multiply(isa, quantized(isa, x)), x, packed.values)
    moved = x + np.float32(100)
    found = packed.multiply(isa, quantized(isa, moved))
    errors = found - moved.astype(np.float64) @ packed.values.T.astype(np.float64)

    size = x.astype(np.float64) ** 2 @ packed.values.T.astype(np.float64) ** 2
    assert (errors**2).sum() / size.sum() < 1.1 * plain


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_quantizes_to_the_same_bits(kind: str, isa: str) -> None:
    x, weight = rows_of_floats(7, 576), rows_of_floats(1, 576, 4)[0]

    np.testing.assert_array_equal(quantized(ISAS[0], x, kind), quantized(isa, x, kind))
    np.testing.assert_array_equal(quantized(ISAS[0], x, kind, weight, 1e-6), quantized(isa, x, kind, weight, 1e-6))


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in ("portable", "neon")])
@pytest.mark.parametrize("quant_type", ["Q4_1", "Q6_K", "IQ4_NL", "IQ2_S"])
def test_every_instruction_set_with_fused_multiply_add_gives_a_product_of_two_planes_the_same_bits(
    quant_type: str, isa: str
) -> None:
    packed = matrix(quant_type, 33, 5)
    x = quantized(isa, rows_of_floats(9, packed.values.shape[1]), "int16")

    assert_same_bits(packed.multiply(ISAS[0], x), packed.multiply(isa, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quant_type", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "IQ4_NL"])
def test_two_planes_leave_what_floats_would_round_anyway(quant_type: str, isa: str) -> None:
    packed = matrix(quant_type, 33, 5)
    x = rows_of_floats(9, packed.values.shape[1])
    errors = {kind: error_of(packed.multiply(isa, quantized(isa, x, kind)), x, packed.values) for kind in KINDS}

    assert 1e-6 < errors["int8"] < 1e-4
    assert errors["int16"] < 1e-9


@settings(max_examples=60, deadline=None)
@given(
    quant_type=st.sampled_from(TYPES),
    isa=st.sampled_from(ISAS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_shape_gives_the_product(quant_type: str, isa: str, rows: int, blocks: int, tokens: int, seed: int) -> None:
    packed = matrix(quant_type, rows, blocks, seed)
    cols = packed.values.shape[1]
    x = rows_of_floats(tokens, cols, seed)

    assert error_of(packed.multiply(isa, x), x, packed.values) < 2e-13
    if quant_type in CODED_TYPES:
        for kind in KINDS:
            rows_in = quantized(isa, x, kind)
            assert error_of(packed.multiply(isa, rows_in), values_of_rows(rows_in, cols), packed.values) < 2e-13


@pytest.mark.parametrize("quant_type", TYPES)
def test_a_loaded_matrix_takes_the_stated_bytes(quant_type: str) -> None:
    type_id = BY_NAME[quant_type].type_id
    stated = library().pocketllm_bytes_per_element(type_id)

    assert library().pocketllm_group_bytes(type_id, 4096) == stated * 16 * 4096
    assert stated >= quant.block_size(quant_type)[1] / quant.block_size(quant_type)[0] or quant_type == "MXFP4"


def test_what_is_no_format_or_no_whole_block_is_refused() -> None:
    assert library().pocketllm_group_bytes(BY_NAME["Q8_K"].type_id, 256) == 0
    assert library().pocketllm_group_bytes(BY_NAME["Q4_K"].type_id, 128) == 0
    assert library().pocketllm_bytes_per_element(999) == 0
    packed = matrix("F16", 3, 1)
    none = address(None)
    assert not library().pocketllm_matmul(None, 0, *packed.head, none, 1, none, none, none)
    coded = matrix("Q4_0", 3, 1)
    for unknown in (2, 7):  # floats, and none at all
        assert not library().pocketllm_quantized_bytes(None, unknown, 64)
        assert not library().pocketllm_quantize(None, unknown, none, 1, 64, none, ctypes.c_float(0), none)
        assert not library().pocketllm_matmul(None, unknown, *coded.head, none, 1, none, none, none)
    assert not library().pocketllm_decode_row(b"no such", *packed.head, 0, none)
    assert not library().pocketllm_decode_row(None, *packed.head, 3, none)
