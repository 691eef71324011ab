"""Values of packed rows, written out: rows of an embedding table, and tiles for the large matrix products."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    byte_of,
    look_up,
    scales_of,
    to_float,
)
from pocketllm.engine.backends.cuda.kernels.words import TABLE as IN_TABLE
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed


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
    w_words, w_high, w_scales, w_shared, index, out, first, count, width, factor, t_0, t_1, t_2, t_3,
    units: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """out[o] = row first + o of the matrix, or factor · row index[o]; in out's dtype.

    Dimensions: rows, words of BLOCKS blocks as they lie: block, place, unit.
    """
    wait()
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = o < count
    if HAS_INDEX:
        row = tl.load(index + o, mask=is_row, other=0).to(tl.int64)
    else:
        row = first + tl.minimum(o, count - 1).to(tl.int64)
    row = row[:, None]
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
    is_in = is_row[:, None] & (u * 32 < width) & (tl.program_id(1) * BLOCKS + word // 16 == block)
    for half in tl.static_range(2):
        group = u * (32 // GROUP) + half * (32 // GROUP - 1)
        own = tl.load(w_scales + (tile * groups + group) * TILE + r)
        scale, minimum = scales_of(own, both, SCALES)
        if (FORM == BYTE) and half == 1:
            w = tl.load(w_words + at + TILE * 16)
        four = half_of_words(w, high, unit, t_0, t_1, t_2, t_3, half, FORM)
        even, odd = tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3))
        code = tl.reshape(tl.join(even, odd), [ROWS, 16 * BLOCKS, 4])
        value = to_float(code - OFFSET) * scale[:, :, None]
        if (SCALES == HALVES) or (SCALES == K):
            value -= minimum[:, :, None]
        if HAS_INDEX:
            value *= factor
        places = (to + half * 16)[:, :, None] + tl.arange(0, 4)[None, None, :]
        tl.store(out + places, value.to(out.dtype.element_ty), mask=is_in[:, :, None])


def unpack_rows(packed: Packed, out: Tensor, first: int = 0, index: Tensor | None = None, factor: float = 1.0) -> None:
    """out = rows of a matrix from `first` on, or factor · rows at `index`. out: [rows, cols], contiguous, any float."""
    layout = packed.layout
    rows, blocks = (TILE_ROWS, 2) if index is None else (1, 8)
    unpack_kernel[(-(-len(out) // rows), -(-packed.units // (4 * blocks)))](
        packed.words, packed.high, packed.scales, packed.shared, packed.high if index is None else index, out, first,
        len(out), packed.cols, float(factor), *layout.packed_table,
        units=packed.units, OFFSET=layout.offset, ROWS=rows, BLOCKS=blocks, GROUP=layout.group,
        FORM=int(layout.form), SCALES=int(layout.scales), HAS_INDEX=index is not None,
        num_warps=4 if index is None else 1, enable_fp_fusion=False,
    )  # fmt: skip
