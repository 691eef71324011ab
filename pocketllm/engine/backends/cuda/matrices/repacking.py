"""A piece of a file's rows brought into its place in a packed matrix: on a GPU by one kernel, elsewhere by torch."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import PER_SHARED, TILE_ROWS, UNIT, Layout, Scales
from pocketllm.engine.backends.cuda.matrices.kernels import codebooks
from pocketllm.engine.backends.cuda.matrices.kernels import repack as kernels
from pocketllm.engine.backends.cuda.matrices.kernels.repack import repack_kernel
from pocketllm.engine.backends.cuda.packing import Packed, Parts, filled, pack, pack_scales, tiled, units_of
from pocketllm.engine.backends.cuda.quant import SPLITS
from pocketllm.engine.backends.cuda.quant.codebooks import places_of_grid
from pocketllm.engine.weights.quant_types import BY_NAME

BLOCKS = 4
"""Of 128 values, for one program: more words than threads, so that loads overlap."""
WARPS = 4


class Reading(NamedTuple):
    """How the kernel reads a type's blocks: words of `kernels.repack`, and offsets in bytes."""

    codes: int
    codes_at: int
    scales: int
    shared_at: int = -1


POINTS = {
    "IQ1_S": "IQ1_S", "IQ1_M": "IQ1_S", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS", "IQ2_S": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS", "IQ3_S": "IQ3_S",
}  # fmt: skip
"""Names of the grids that types pick from."""
READINGS: Mapping[str, Reading] = {
    "Q4_0": Reading(kernels.NIBBLES.value, 2, kernels.HALF.value),
    "IQ4_NL": Reading(kernels.NIBBLES.value, 2, kernels.HALF.value),
    "Q4_1": Reading(kernels.NIBBLES.value, 4, kernels.HALVES.value),
    "Q5_0": Reading(kernels.FIFTHS.value, 2, kernels.HALF.value),
    "Q5_1": Reading(kernels.FIFTHS.value, 4, kernels.HALVES.value),
    "Q8_0": Reading(kernels.BYTES.value, 2, kernels.HALF.value),
    "MXFP4": Reading(kernels.NIBBLES.value, 1, kernels.EXPONENT.value),
    "Q2_K": Reading(kernels.TWOS.value, 16, kernels.FOUR_BITS.value, 80),
    "Q3_K": Reading(kernels.THREES.value, 0, kernels.SCALES_Q3_K.value, 108),
    "Q4_K": Reading(kernels.PAIRS.value, 16, kernels.SIX_BITS.value, 0),
    "Q5_K": Reading(kernels.PAIRS_FIFTHS.value, 16, kernels.SIX_BITS.value, 0),
    "Q6_K": Reading(kernels.SIXES.value, 0, kernels.SCALES_Q6_K.value, 208),
    "IQ4_XS": Reading(kernels.NIBBLES.value, 8, kernels.SCALES_IQ4_XS.value, 0),
    **{name: Reading(getattr(codebooks, name).value, 0, getattr(codebooks, name).value, 0) for name in POINTS},
}
"""Types that go from the file's bytes to their layout in one launch; of others torch makes codes and scales first."""
TAKEN_APART = Reading(kernels.BYTES.value, 0, kernels.NO_SCALES.value)
"""Codes of a byte each."""
SCALE_DTYPES = {
    Scales.HALF: torch.float16,
    Scales.HALVES: torch.int32,
    Scales.K: torch.int16,
    Scales.SIGNED: torch.int8,
    Scales.FLOAT: torch.float32,
}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def new_packed(layout: Layout, rows: int, cols: int, device: torch.device) -> Packed:
    """Room for a matrix, to be written by `repack`."""
    tiles, units = -(-rows // TILE_ROWS), units_of(cols)
    blocks, groups = units // 4, units * UNIT // layout.group
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    words = nothing.new_empty(tiles, blocks, layout.planes, TILE_ROWS, 16)
    high = nothing.new_empty(tiles, blocks, TILE_ROWS, 4 * layout.high_words) if layout.high_words else nothing
    scales = nothing.new_empty(tiles, groups, TILE_ROWS, dtype=SCALE_DTYPES[layout.scales])
    shared = nothing
    if layout.scales in (Scales.K, Scales.SIGNED):
        is_half = layout.scales is Scales.SIGNED and layout.shared_bytes == 2
        dtype = torch.int32 if layout.scales is Scales.K else torch.float16 if is_half else torch.float32
        shared = nothing.new_empty(tiles, -(-units * UNIT // PER_SHARED), TILE_ROWS, dtype=dtype)
    return Packed(layout, rows, cols, words, high, scales, shared)


def repack(blocks: Tensor, quant_type: str, packed: Packed, first: int) -> None:
    """Rows from `first` on, the first of a tile, from their blocks: uint8 [rows, blocks, block bytes] on its device."""
    assert first % TILE_ROWS == 0, first
    # in Triton's interpreter torch is faster by far
    (repack_by_kernels if blocks.device.type == "cuda" else write)(blocks, quant_type, packed, first)


def repack_by_kernels(blocks: Tensor, quant_type: str, packed: Packed, first: int) -> None:
    """In one launch, or where torch must take the blocks apart with one for the codes."""
    if quant_type in READINGS:
        kind = BY_NAME[quant_type]
        points = places_of_grid(POINTS[quant_type], quant_type, blocks.device) if quant_type in POINTS else blocks
        launch(blocks, points, packed, first, READINGS[quant_type], kind.block_elements, kind.block_bytes)
        return
    parts = SPLITS[quant_type](whole_tiles(blocks))
    codes = parts.codes.contiguous()
    launch(codes, codes, packed, first, TAKEN_APART, UNIT, UNIT)
    write_scales(parts, packed, first)


def launch(
    source: Tensor, points: Tensor, packed: Packed, first: int, reading: Reading, elements: int, block_bytes: int
) -> None:
    """Blocks of so many values and bytes to words, and to scales where they hold any."""
    rows, layout, blocks = len(source), packed.layout, packed.units // 4
    assert source.is_contiguous()
    repack_kernel[(-(-rows // TILE_ROWS), -(-blocks // BLOCKS))](
        source, points, packed.words, packed.high, as_bits(packed.scales), as_bits(packed.shared), rows, packed.cols,
        packed.cols // elements * block_bytes, first // TILE_ROWS, blocks, BLOCKS=BLOCKS, ELEMENTS=elements,
        BLOCK_BYTES=block_bytes, GROUP=layout.group, FORM=int(layout.form), CODES=reading.codes, AT=reading.codes_at,
        SCALES=reading.scales, SHARED_AT=reading.shared_at, num_warps=WARPS,
    )  # fmt: skip


def as_bits(values: Tensor) -> Tensor:
    """The same memory as integers."""
    return values.view(BITS[values.element_size()])


def write(blocks: Tensor, quant_type: str, packed: Packed, first: int) -> None:
    """`repack` by torch."""
    parts = pack(SPLITS[quant_type](whole_tiles(blocks)), packed.layout)
    for target, part in zip((packed.words, packed.high, packed.scales, packed.shared), parts, strict=True):
        if part.ndim > 1:
            put(part, target, first)


def write_scales(parts: Parts, packed: Packed, first: int) -> None:
    """Scales alone."""
    scales, shared = pack_scales(parts, packed.layout.scales)
    width = packed.units * UNIT
    put(tiled(filled(scales, width // packed.layout.group)), packed.scales, first)
    if shared.ndim > 1:
        put(tiled(filled(shared, -(-width // PER_SHARED))), packed.shared, first)


def put(part: Tensor, target: Tensor, first: int) -> None:
    """Tiles at the row that they begin with."""
    target[first // TILE_ROWS : first // TILE_ROWS + len(part)] = part


def whole_tiles(blocks: Tensor) -> Tensor:
    """Rows of zero bytes after the last ones."""
    short = -len(blocks) % TILE_ROWS
    return torch.cat([blocks, blocks.new_zeros(short, *blocks.shape[1:])]) if short else blocks
