"""Blocks of the types that pick several values at once from a grid, read value by value; `quant.codebooks` says how.

Points are places in the type's table, 4 or 8 of a pick one after another; a grid's first is that of zero bytes.
"""

import triton
import triton.language as tl

IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = (tl.constexpr(number) for number in range(16, 23))
"""How codes lie in a block, and scales too."""
NEGATIVE = tl.constexpr(8)
SHIFTED_DOWN = tl.constexpr(3)
"""As in `quant.codebooks`."""


@triton.jit
def byte_at(block, at, is_in):
    """As a number of 32 bits; 0 outside."""
    return tl.load(block + at, mask=is_in, other=0).to(tl.int32)


@triton.jit
def half_at(block, at, is_in):
    """Two bytes."""
    return byte_at(block, at, is_in) | byte_at(block, at + 1, is_in) << 8


@triton.jit
def even_sign(block, at, i, is_in):
    """Seven bits of the word at `at` for each eight values; the eighth makes the number of negative ones even."""
    word = half_at(block, at, is_in) | half_at(block, at + 2, is_in) << 16
    bits = (word >> (i // 8 % 4 * 7)) & 127
    return sign_of_seven(bits, i % 8)


@triton.jit
def sign_of_seven(bits, j):
    """1 where value j of eight is negative."""
    even = bits ^ bits >> 4
    even ^= even >> 2
    even ^= even >> 1
    return tl.where(j == 7, even, bits >> j) & 1


@triton.jit
def place_of(block, points, i, is_in, CODES: tl.constexpr):
    """The place in the table of value i of a block."""
    by_8, j = i // 8, i % 8
    if CODES == IQ2_XXS:
        at = 2 + i // 32 * 8
        pick = byte_at(block, at + by_8 % 4, is_in)
        return tl.load(points + pick * 8 + j).to(tl.int32) + NEGATIVE * even_sign(block, at + 4, i, is_in)
    elif CODES == IQ2_XS:
        word = half_at(block, 2 + by_8 * 2, is_in)
        return tl.load(points + (word & 511) * 8 + j).to(tl.int32) + NEGATIVE * sign_of_seven(word >> 9, j)
    elif CODES == IQ2_S:
        upper = (byte_at(block, 66 + i // 32, is_in) >> (by_8 % 4 * 2)) & 3
        pick = byte_at(block, 2 + by_8, is_in) | upper << 8
        sign = (byte_at(block, 34 + by_8, is_in) >> j) & 1
        return tl.load(points + pick * 8 + j).to(tl.int32) + NEGATIVE * sign
    elif CODES == IQ3_XXS:
        pick = byte_at(block, 2 + i // 4, is_in)
        sign = even_sign(block, 66 + i // 32 * 4, i, is_in)
        return tl.load(points + pick * 4 + i % 4).to(tl.int32) + NEGATIVE * sign
    elif CODES == IQ3_S:
        ninth = (byte_at(block, 66 + i // 32, is_in) >> (i // 4 % 8)) & 1
        pick = byte_at(block, 2 + i // 4, is_in) | ninth << 8
        sign = (byte_at(block, 74 + by_8, is_in) >> j) & 1
        return tl.load(points + pick * 4 + i % 4).to(tl.int32) + NEGATIVE * sign
    elif CODES == IQ1_S:
        word = half_at(block, 34 + i // 32 * 2, is_in)
        pick = byte_at(block, 2 + by_8, is_in) | ((word >> (by_8 % 4 * 3)) & 7) << 8
        return tl.load(points + pick * 8 + j).to(tl.int32) + SHIFTED_DOWN * (word >> 15)
    else:
        nibble = (byte_at(block, 32 + i // 16, is_in) >> (by_8 % 2 * 4)) & 15
        pick = byte_at(block, by_8, is_in) | (nibble & 7) << 8
        return tl.load(points + pick * 8 + j).to(tl.int32) + SHIFTED_DOWN * (nibble >> 3)


@triton.jit
def scale_of_picks(block, g, is_in, SCALES: tl.constexpr):
    """The signed byte of group g."""
    if SCALES == IQ2_XXS:
        return 2 * (byte_at(block, 9 + g * 8, is_in) >> 4) + 1
    elif SCALES == IQ3_XXS:
        return 2 * (byte_at(block, 69 + g * 4, is_in) >> 4) + 1
    elif SCALES == IQ1_S:
        return 2 * ((byte_at(block, 35 + g * 2, is_in) >> 4) & 7) + 1
    elif SCALES == IQ1_M:
        return 2 * ((half_at(block, 48 + g // 4 * 2, is_in) >> (g % 4 * 3)) & 7) + 1
    else:
        at: tl.constexpr = 66 if SCALES == IQ2_XS else (74 if SCALES == IQ2_S else 106)
        return 2 * ((byte_at(block, at + g // 2, is_in) >> (g % 2 * 4)) & 15) + 1


@triton.jit
def shared_of_picks(block, is_in, SCALES: tl.constexpr):
    """The float32 that a block's scales are multiplied by, as its bits."""
    if SCALES == IQ1_M:  # four bits above the scales of each word
        bits = byte_at(block, 49, is_in) >> 4 | byte_at(block, 51, is_in) >> 4 << 4
        bits |= byte_at(block, 53, is_in) >> 4 << 8 | byte_at(block, 55, is_in) >> 4 << 12
    else:
        bits = half_at(block, 0, is_in)
    factor: tl.constexpr = 1.0 if SCALES == IQ3_S else (0.25 if SCALES == IQ3_XXS else 0.125)
    shared = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor
    return shared.to(tl.int32, bitcast=True)
