"""Blocks of a file → words, high bits, scales and shared scales, each read once and written once.

`packing.pack` and `quant` do the same by torch, in some thirty passes: they say in words what each number is, and the
tests hold this kernel to them bit by bit.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.layouts import Form
from pocketllm.engine.backends.cuda.matrices.kernels.codebooks import (
    IQ1_S,
    byte_at,
    half_at,
    place_of,
    scale_of_picks,
    shared_of_picks,
)

BYTE, TABLE = tl.constexpr(int(Form.BYTE)), tl.constexpr(int(Form.TABLE))
NIBBLE_1, NIBBLE_2 = tl.constexpr(int(Form.NIBBLE_1)), tl.constexpr(int(Form.NIBBLE_2))

# how a block holds its codes; the offset AT says where they begin
BYTES, NIBBLES, FIFTHS, PAIRS, PAIRS_FIFTHS, TWOS, THREES, SIXES = (tl.constexpr(number) for number in range(8))
# how it holds what its groups are multiplied by
NO_SCALES, HALF, HALVES, EXPONENT, SIX_BITS, FOUR_BITS, SCALES_Q3_K, SCALES_Q6_K, SCALES_IQ4_XS = (
    tl.constexpr(number) for number in range(9)
)


@triton.jit
def code_of(block, points, i, is_in, CODES: tl.constexpr, AT: tl.constexpr):
    """The code of value i of a block."""
    of_32 = i % 32
    if CODES >= IQ1_S:
        return place_of(block, points, i, is_in, CODES)
    elif CODES == BYTES:
        return byte_at(block, AT + i, is_in)
    elif CODES == NIBBLES:
        return (byte_at(block, AT + i // 32 * 16 + i % 16, is_in) >> (i // 16 % 2 * 4)) & 15
    elif CODES == FIFTHS:
        fifth = (byte_at(block, AT + i // 8, is_in) >> (i % 8)) & 1
        return (byte_at(block, AT + 4 + i % 16, is_in) >> (i // 16 * 4)) & 15 | fifth << 4
    elif CODES == PAIRS:
        return (byte_at(block, AT + i // 64 * 32 + of_32, is_in) >> (i // 32 % 2 * 4)) & 15
    elif CODES == PAIRS_FIFTHS:
        fifth = (byte_at(block, AT + of_32, is_in) >> (i // 32)) & 1
        return (byte_at(block, AT + 32 + i // 64 * 32 + of_32, is_in) >> (i // 32 % 2 * 4)) & 15 | fifth << 4
    elif CODES == TWOS:
        return (byte_at(block, AT + i // 128 * 32 + of_32, is_in) >> (i // 32 % 4 * 2)) & 3
    elif CODES == THREES:
        third = (byte_at(block, AT + of_32, is_in) >> (i // 32)) & 1
        return (byte_at(block, AT + 32 + i // 128 * 32 + of_32, is_in) >> (i // 32 % 4 * 2)) & 3 | third << 2
    else:
        low = byte_at(block, AT + i // 128 * 64 + i % 64, is_in) >> (i // 64 % 2 * 4)
        upper = byte_at(block, AT + 128 + i // 128 * 32 + of_32, is_in) >> (i // 32 % 4 * 2)
        return low & 15 | (upper & 3) << 4


@triton.jit
def scale_of(block, g, is_in, is_column, SCALES: tl.constexpr):
    """What group g of a block is multiplied by, and what is taken off, as the layout keeps them.

    is_column: false for groups that fill up a row's last 128 values, whose scale is 0.
    """
    if SCALES >= IQ1_S:
        return scale_of_picks(block, g, is_in, SCALES)
    elif SCALES == HALF:
        return half_at(block, 0, is_in)
    elif SCALES == HALVES:
        return half_at(block, 0, is_in) | half_at(block, 2, is_in) << 16
    elif SCALES == EXPONENT:  # 2^(e - 128): the two smallest have no bits of an exponent
        e = byte_at(block, 0, is_in)
        return tl.where(is_column, tl.where(e < 2, (1 << 21) << e, (e - 1) << 23), 0)
    elif SCALES == SIX_BITS:
        of_4, is_late = g % 4, g // 4
        first, second = byte_at(block, 4 + of_4, is_in), byte_at(block, 8 + of_4, is_in)
        third = byte_at(block, 12 + of_4, is_in)
        scale = tl.where(is_late != 0, third & 15 | first >> 6 << 4, first & 63)
        return scale | tl.where(is_late != 0, third >> 4 | second >> 6 << 4, second & 63) << 8
    elif SCALES == FOUR_BITS:
        both = byte_at(block, g, is_in)
        return both & 15 | both >> 4 << 8
    elif SCALES == SCALES_Q3_K:
        low = (byte_at(block, 96 + g % 8, is_in) >> (g // 8 * 4)) & 15
        return (low | ((byte_at(block, 104 + g % 4, is_in) >> (g // 4 * 2)) & 3) << 4) - 32
    elif SCALES == SCALES_Q6_K:
        return byte_at(block, 192 + g, is_in)
    else:
        low = (byte_at(block, 4 + g // 2, is_in) >> (g % 2 * 4)) & 15
        return (low | ((byte_at(block, 2 + g // 4, is_in) >> (g % 4 * 2)) & 3) << 4) - 32


@triton.jit
def write_codes(
    source, points, words, high, rows, cols, row_bytes, tile, first_block, blocks, target,
    BLOCKS: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, FORM: tl.constexpr, CODES: tl.constexpr,
    AT: tl.constexpr,
):  # fmt: skip
    """Words and high bits of BLOCKS blocks of a tile. Dimensions: block, row and place; unit."""
    n, unit = tl.arange(0, 64 * BLOCKS)[:, None], tl.arange(0, 4)[None, :]
    block, r, place = first_block + n // 64, n // 4 % 16, n % 4
    row = tile * 16 + r
    is_in, is_block = row < rows, block < blocks
    start = source + row.to(tl.int64) * row_bytes
    column = block * 128 + unit * 32 + place * 4
    planes: tl.constexpr = 2 if FORM == BYTE else 1
    of_row = (target * blocks + block) * 16 + r
    to = words + ((target * blocks + block) * planes * 16 + r) * 16 + place * 4 + unit
    word, upper = column * 0, column * 0
    for half in tl.static_range(2):
        for byte in tl.static_range(4):
            c = column + half * 16 + byte
            start_of_block = start + c // ELEMENTS * BLOCK_BYTES
            code = code_of(start_of_block, points, c % ELEMENTS, is_in & (c < cols), CODES, AT)
            if FORM == BYTE:
                word |= code << (8 * byte)
            elif FORM == TABLE:
                word |= code << (16 * half + 4 * byte)
            else:
                word |= (code & 15) << (4 * half + 8 * byte)
            if FORM == NIBBLE_1:
                upper |= (code >> 4) << (2 * unit + half + 8 * byte)
            if FORM == NIBBLE_2:
                upper |= (code >> 4) << (4 * (unit % 2) + 2 * half + 8 * byte)
        if FORM == BYTE:
            tl.store(to + half * 256, word, mask=is_block)
            word = column * 0
    if FORM != BYTE:
        tl.store(to, word, mask=is_block)
    # sums of bits that no two have in common
    if FORM == NIBBLE_1:
        tl.store(high + of_row * 4 + place, tl.sum(upper, 1, keep_dims=True), mask=is_block)
    if FORM == NIBBLE_2:
        pairs = tl.sum(tl.reshape(upper, [64 * BLOCKS, 2, 2]), 2)
        tl.store(high + (of_row * 4 + place) * 2 + tl.arange(0, 2)[None, :], pairs, mask=is_block)


@triton.jit
def write_scales(
    source, scales, shared, rows, cols, row_bytes, tile, first_block, blocks, target,
    BLOCKS: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, SHARED_AT: tl.constexpr,
):  # fmt: skip
    """Scales of the same. Dimension: group (or 256s), then rows in the order 0, 8, 1, 9, …"""
    each: tl.constexpr = 128 // GROUP
    s = tl.arange(0, BLOCKS * each * 16)
    row = tile * 16 + s % 2 * 8 + s % 16 // 2
    group = first_block * each + s // 16
    column = group * GROUP
    start = source + row.to(tl.int64) * row_bytes + column // ELEMENTS * BLOCK_BYTES
    scale = scale_of(start, column % ELEMENTS // GROUP, (row < rows) & (column < cols), column < cols, SCALES)
    to = scales + (target * blocks * each + group) * 16 + s % 16
    tl.store(to, scale.to(scales.dtype.element_ty), mask=group < blocks * each)
    if SHARED_AT >= 0:
        s = tl.arange(0, BLOCKS * 8)
        row = tile * 16 + s % 2 * 8 + s % 16 // 2
        whole = first_block // 2 + s // 16
        start = source + row.to(tl.int64) * row_bytes + whole * BLOCK_BYTES
        is_in = (row < rows) & (whole < blocks // 2)
        both = shared_of_picks(start, is_in, SCALES) if SCALES >= IQ1_S else half_at(start, SHARED_AT, is_in)
        if (SCALES == SIX_BITS) or (SCALES == FOUR_BITS):
            both |= half_at(start, SHARED_AT + 2, is_in) << 16
        to = shared + (target * (blocks // 2) + whole) * 16 + s % 16
        tl.store(to, both.to(shared.dtype.element_ty), mask=whole < blocks // 2)


@triton.jit(do_not_specialize=["rows", "cols", "row_bytes", "first_tile", "blocks"])
def repack_kernel(
    source, points, words, high, scales, shared, rows, cols, row_bytes, first_tile, blocks,
    BLOCKS: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    CODES: tl.constexpr, AT: tl.constexpr, SCALES: tl.constexpr, SHARED_AT: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of 128 values of a tile of 16 rows; beyond rows and cols bytes are zeros.

    source: [rows, row_bytes], the first row being that of tile `first_tile` of the matrix; points: a grid, where
    codes are picked from one.
    """
    tile, first_block = tl.program_id(0), tl.program_id(1) * BLOCKS
    target = (first_tile + tile).to(tl.int64)
    write_codes(
        source, points, words, high, rows, cols, row_bytes, tile, first_block, blocks, target,
        BLOCKS, ELEMENTS, BLOCK_BYTES, FORM, CODES, AT,
    )  # fmt: skip
    if SCALES != NO_SCALES:
        write_scales(
            source, scales, shared, rows, cols, row_bytes, tile, first_block, blocks, target,
            BLOCKS, ELEMENTS, BLOCK_BYTES, GROUP, SCALES, SHARED_AT,
        )  # fmt: skip
