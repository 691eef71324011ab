"""From packed words to words of four signed bytes, their products with bytes of x, and groups' scales.

Triton's interpreter has no inline assembly, so what is one instruction on the GPU is spelled out for it.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.layouts import Form, Scales

NIBBLE_1, NIBBLE_2 = tl.constexpr(int(Form.NIBBLE_1)), tl.constexpr(int(Form.NIBBLE_2))
BYTE, TABLE = tl.constexpr(int(Form.BYTE)), tl.constexpr(int(Form.TABLE))
HALVES, K, SIGNED = tl.constexpr(int(Scales.HALVES)), tl.constexpr(int(Scales.K)), tl.constexpr(int(Scales.SIGNED))
LOOK_UP_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 i, u, v, lo, hi, s; "
    "and.b32 i, $1, 0x7777; prmt.b32 u, $2, $3, i; prmt.b32 v, $4, $5, i; "
    "shr.b32 i, $1, 1; lop3.b32 i, i, 0x4444, 0x3210, 0xea; prmt.b32 lo, u, v, i; "
    "shr.b32 s, $1, 16; and.b32 i, s, 0x7777; prmt.b32 u, $2, $3, i; prmt.b32 v, $4, $5, i; "
    "shr.b32 i, s, 1; lop3.b32 i, i, 0x4444, 0x3210, 0xea; prmt.b32 hi, u, v, i; "
    "prmt.b32 $0, lo, hi, 0x6420; }"
)
"""Bytes of a 16-byte table at the low halves of a word's bytes."""
FLOAT_OF_INT = tl.constexpr(0x4B400000)
"""1.5 · 2^23 as float32: a small integer added to its bits is the float 12582912 + integer."""


@triton.jit
def byte_of(word, T: tl.constexpr):
    """Byte T of each word, signed."""
    return (word << (24 - 8 * T)) >> 24


@triton.jit
def look_up(word, t_0, t_1, t_2, t_3):
    """Entries of a table at the low half of each byte."""
    if IS_INTERPRETED:
        result = word & 0
        for t in tl.static_range(4):
            place = (word >> (8 * t)) & 15
            lower, upper = tl.where(place >= 4, t_1, t_0), tl.where(place >= 12, t_3, t_2)
            entry = tl.where(place >= 8, upper, lower)
            result |= ((entry >> (8 * (place & 3))) & 255) << (8 * t)
        return result
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP_ASSEMBLY, "=r,r,r,r,r,r", [word, t_0, t_1, t_2, t_3], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def bytes_of(w, high, i, t_0, t_1, t_2, t_3, H: tl.constexpr, FORM: tl.constexpr):
    """Part H of words w as words of four signed bytes, before the offset; i: which word of its group each is."""
    if FORM == BYTE:
        return w
    elif FORM == TABLE:
        return look_up(w >> (4 * H), t_0, t_1, t_2, t_3)
    elif FORM == NIBBLE_1:
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((high >> (2 * i + H)) & 0x01010101) << 4)
    elif FORM == NIBBLE_2:
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((high >> (4 * i + 2 * H)) & 0x03030303) << 4)
    else:
        return (w >> (4 * H)) & 0x0F0F0F0F


@triton.jit
def dot_bytes(a, x, total):
    """total + Σ of four signed bytes times four."""
    if IS_INTERPRETED:
        for t in tl.static_range(4):
            total += byte_of(a, t) * byte_of(x, t)
        return total
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, x, total], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def to_float(number):
    """A float32 of an integer below 2^22; the GPU's own conversion is many times slower."""
    return (number + FLOAT_OF_INT).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def half_of(pair, H: tl.constexpr):
    """One float16 of an int32 that holds two, as float32."""
    return ((pair >> (16 * H)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scales(scales, shared, at, shared_at, SCALES: tl.constexpr):
    """What memory has of groups' scales: of each group, and of 256 values."""
    own = tl.load(scales + at)
    both = own
    if (SCALES == K) or (SCALES == SIGNED):
        both = tl.load(shared + shared_at)
    return own, both


@triton.jit
def scales_of(own, both, SCALES: tl.constexpr):
    """Scale and minimum of groups, float32; the minimum is taken away, and 0 where a layout has none."""
    if SCALES == HALVES:
        scale = half_of(own, 0)
        minimum = -half_of(own, 1)
    elif SCALES == K:
        small = own.to(tl.int32)
        scale = half_of(both, 0) * to_float(small & 255)
        minimum = half_of(both, 1) * to_float((small >> 8) & 255)
    elif SCALES == SIGNED:
        scale = both.to(tl.float32) * to_float(own.to(tl.int32))
        minimum = scale * 0.0
    else:
        scale = own.to(tl.float32)
        minimum = scale * 0.0
    return scale, minimum


@triton.jit
def group_scales(scales, shared, at, shared_at, SCALES: tl.constexpr):
    """Both in one."""
    own, both = load_scales(scales, shared, at, shared_at, SCALES)
    return scales_of(own, both, SCALES)
