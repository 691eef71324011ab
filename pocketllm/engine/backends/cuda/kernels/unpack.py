"""Values of packed rows, written out: rows of an embedding table, and tiles for the large matrix products."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.codes import ULPS, codes_of, of_unit, table_without_signs
from pocketllm.engine.backends.cuda.kernels.fetch import fetch_tile, opened
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    FLOAT,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    SECOND,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    byte_of,
    half_of,
    look_up,
    scales_of,
    to_float,
)
from pocketllm.engine.backends.cuda.kernels.words import TABLE as IN_TABLE
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed

WARPS = 4
"""Of a program that unpacks a tile: as many blocks."""
BLOCKS_AT_ONCE = 8
"""Of a row that is picked by itself."""


@triton.jit
def half_of_words(w, high, unit, t_0, t_1, t_2, t_3, H: tl.constexpr, FORM: tl.constexpr):
    """Half H of words as words of four signed bytes; unit: which unit of its block each is of."""
    if FORM == BYTE:
        return w
    elif FORM == IN_TABLE:
        return look_up(w >> (16 * H), t_0, t_1, t_2, t_3)
    elif FORM == NIBBLE_1:
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((high >> (2 * unit + H)) & 0x01010101) << 4)
    elif FORM == NIBBLE_2:
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((high >> (4 * (unit % 2) + 2 * H)) & 0x03030303) << 4)
    else:
        return (w >> (4 * H)) & 0x0F0F0F0F


@triton.jit
def unpack_kernel(
    w_words, w_high, w_scales, w_shared, index, out, width, factor, t_0, t_1, t_2, t_3,
    units: tl.constexpr, OFFSET: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """out[o] = factor · row index[o]; in out's dtype.

    Dimensions: the row, words of BLOCKS blocks as they lie: block, place, unit.
    """
    wait()
    o = tl.program_id(0) + tl.arange(0, 1)
    row = tl.load(index + o).to(tl.int64)[:, None]
    word = tl.arange(0, 16 * BLOCKS)[None, :]
    block = tl.program_id(1) * BLOCKS + word // 16
    block = tl.minimum(block, units // 4 - 1)
    place, unit = word // 4 % 4, word % 4
    u = block * 4 + unit
    planes: tl.constexpr = 2 if FORM == BYTE else 1
    tile, r = row // TILE, row % TILE
    of_block = tile * (units // 4) + block
    at = (of_block * planes * TILE + r) * 16 + word % 16
    w = tl.load(w_words + at)
    high = w
    if FORM == NIBBLE_1:
        high = tl.load(w_high + (of_block * TILE + r) * 4 + place)
    if FORM == NIBBLE_2:
        high = tl.load(w_high + ((of_block * TILE + r) * 4 + place) * 2 + unit // 2)
    groups: tl.constexpr = units * 32 // GROUP
    r = r % 8 * 2 + r // 8  # as scales lie
    both = w
    if (SCALES == K) or (SCALES == SIGNED):
        each: tl.constexpr = SHARED_VALUES // 32
        both = tl.load(w_shared + (tile * tl.cdiv(units, each) + u // each) * TILE + r)
    to = o.to(tl.int64)[:, None] * width + u * 32 + place * 4
    is_in = (u * 32 < width) & (tl.program_id(1) * BLOCKS + word // 16 == block)
    for half in tl.static_range(2):
        group = u * (32 // GROUP) + half * (32 // GROUP - 1)
        own = tl.load(w_scales + (tile * groups + group) * TILE + r)
        scale, minimum = scales_of(own, both, SCALES)
        if (FORM == BYTE) and half == 1:
            w = tl.load(w_words + at + TILE * 16)
        four = half_of_words(w, high, unit, t_0, t_1, t_2, t_3, half, FORM)
        even, odd = tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3))
        code = tl.reshape(tl.join(even, odd), [1, 16 * BLOCKS, 4])
        value = to_float(code - OFFSET) * scale[:, :, None]
        if (SCALES == HALVES) or (SCALES == K):
            value -= minimum[:, :, None]
        value *= factor
        places = (to + half * 16)[:, :, None] + tl.arange(0, 4)[None, None, :]
        tl.store(out + places, value.to(out.dtype.element_ty), mask=is_in[:, :, None])


@triton.jit
def write_unit(out, at, pairs, scales, is_in, SCALES: tl.constexpr):
    """A thread's eight values of a row's unit, four neighbors and the four that are 16 on."""
    scale, minimum, second, second_minimum = scales
    write_four(out, at, pairs[0], pairs[1], ULPS, scale, minimum, is_in, SCALES)
    write_four(out, at + 16, pairs[2], pairs[3], ULPS / SECOND, second, second_minimum, is_in, SCALES)


@triton.jit
def write_four(out, at, even, odd, FACTOR: tl.constexpr, scale, minimum, is_in, SCALES: tl.constexpr):
    """Values of pairs 0 and 2, 1 and 3 of float16 codes, which are as many times 1 / FACTOR."""
    v_0, v_2, v_1, v_3 = half_of(even, 0), half_of(even, 1), half_of(odd, 0), half_of(odd, 1)
    if SCALES == FLOAT:  # such a scale may be too large to be multiplied first
        v_0, v_1, v_2, v_3 = v_0 * FACTOR, v_1 * FACTOR, v_2 * FACTOR, v_3 * FACTOR
    else:
        scale *= FACTOR
    v_0, v_1, v_2, v_3 = v_0 * scale, v_1 * scale, v_2 * scale, v_3 * scale
    if (SCALES == HALVES) or (SCALES == K):
        v_0, v_1, v_2, v_3 = v_0 - minimum, v_1 - minimum, v_2 - minimum, v_3 - minimum
    four = tl.reshape(tl.join(tl.join(v_0, v_2), tl.join(v_1, v_3)), [at.shape[0], 4])
    tl.store(out + (at[:, None] + tl.arange(0, 4)[None, :]), four.to(out.dtype.element_ty), mask=is_in[:, None])


@triton.jit
def tiles_kernel(
    w_words, w_high, w_scales, w_shared, out, first_tile, count, width, t_0, t_1, t_2, t_3,
    units: tl.constexpr, OFFSET: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """out[o] = row first_tile · 16 + o of the matrix, for the 16 rows of a tile and WARPS blocks of each."""
    wait()
    thread = tl.arange(0, 32 * WARPS)
    lane, block = thread % 32, tl.program_id(1) * WARPS + thread // 32
    tile = (first_tile + tl.program_id(0)).to(tl.int64)
    t_0, t_1, t_2, t_3 = table_without_signs(t_0, t_1, t_2, t_3, FORM, OFFSET)
    w = fetch_tile(w_words, w_high, w_scales, w_shared, tile, block, lane, units, GROUP, FORM, SCALES)
    near_scales, far_scales = opened(w[2], GROUP, SCALES), opened(w[3], GROUP, SCALES)
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    o = tl.program_id(0) * 16 + lane // 4
    at = o.to(tl.int64) * width + block * 128 + lane % 4 * 4
    for step in tl.static_range(4):
        near, far = codes_of(w, t_0, t_1, t_2, t_3, step, FORM, OFFSET)
        is_in = block * 128 + step * 32 < width
        scales = of_unit(near_scales, step, GROUP, has_min)
        write_unit(out, at + step * 32, near, scales, is_in & (o < count), SCALES)
        scales = of_unit(far_scales, step, GROUP, has_min)
        write_unit(out, at + step * 32 + 8 * width, far, scales, is_in & (o + 8 < count), SCALES)


def unpack_rows(packed: Packed, out: Tensor, first: int = 0) -> None:
    """out = rows of a matrix from `first` on, the first of a tile. out: [rows, cols], contiguous, any float."""
    layout = packed.layout
    assert first % TILE_ROWS == 0, first
    tiles_kernel[(-(-len(out) // TILE_ROWS), -(-packed.units // (4 * WARPS)))](
        packed.words, packed.high, packed.scales, packed.shared, out, first // TILE_ROWS, len(out), packed.cols,
        *layout.packed_table, units=packed.units, OFFSET=layout.offset, WARPS=WARPS, GROUP=layout.group,
        FORM=int(layout.form), SCALES=int(layout.scales), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def unpack_indexed(packed: Packed, index: Tensor, out: Tensor, factor: float) -> None:
    """out = factor · rows of a matrix at `index`. out: [rows, cols], contiguous, any float."""
    layout = packed.layout
    unpack_kernel[(len(out), -(-packed.units // (4 * BLOCKS_AT_ONCE)))](
        packed.words, packed.high, packed.scales, packed.shared, index, out, packed.cols, float(factor),
        *layout.packed_table, units=packed.units, OFFSET=layout.offset, BLOCKS=BLOCKS_AT_ONCE, GROUP=layout.group,
        FORM=int(layout.form), SCALES=int(layout.scales), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
