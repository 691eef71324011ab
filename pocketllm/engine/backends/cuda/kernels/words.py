"""From packed words to words of four signed bytes, their products with bytes of x, and groups' scales.

Triton's interpreter has no inline assembly, so what is one instruction on the GPU is spelled out for it.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.layouts import PER_SHARED, TILE_ROWS, Form, Scales

NIBBLE_1, NIBBLE_2 = tl.constexpr(int(Form.NIBBLE_1)), tl.constexpr(int(Form.NIBBLE_2))
BYTE, TABLE = tl.constexpr(int(Form.BYTE)), tl.constexpr(int(Form.TABLE))
HALVES, K, SIGNED = tl.constexpr(int(Scales.HALVES)), tl.constexpr(int(Scales.K)), tl.constexpr(int(Scales.SIGNED))
FLOAT = tl.constexpr(int(Scales.FLOAT))
TILE, SHARED_VALUES = tl.constexpr(TILE_ROWS), tl.constexpr(PER_SHARED)
LOOK_UP_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 i, u, v; "
    "and.b32 i, $1, 0x7777; prmt.b32 u, $2, $3, i; prmt.b32 v, $4, $5, i; "
    "shr.b32 i, $1, 1; lop3.b32 i, i, 0x4444, 0x3210, 0xea; prmt.b32 $0, u, v, i; }"
)
"""Bytes of a 16-byte table at the four lowest halves of bytes of a word: by three bits, then by the fourth."""
LOOK_UP_BOTH = tl.constexpr(
    "{ .reg .b32 i, s, u, v; "
    "and.b32 i, $2, 0x77777777; shr.b32 s, $2, 1; lop3.b32 s, s, 0x44444444, 0x32103210, 0xea; "
    "prmt.b32 u, $3, $4, i; prmt.b32 v, $5, $6, i; prmt.b32 $0, u, v, s; shr.b32 i, i, 16; shr.b32 s, s, 16; "
    "prmt.b32 u, $3, $4, i; prmt.b32 v, $5, $6, i; prmt.b32 $1, u, v, s; }"
)
"""The same at all eight."""
LOOK_UP_POSITIVE = tl.constexpr(
    "{ .reg .b32 i, j, u, v; "
    "xor.b32 j, $2, 0x88888888; prmt.b32 u, $3, $4, $2; prmt.b32 v, $5, $6, j; or.b32 $0, u, v; "
    "shr.b32 i, $2, 16; shr.b32 j, j, 16; prmt.b32 u, $3, $4, i; prmt.b32 v, $5, $6, j; or.b32 $1, u, v; }"
)
"""The same of a table without negative numbers: where the fourth bit is set, `prmt` gives eight times a byte's sign."""
SECOND = tl.constexpr(16.0)
"""What codes of a unit's second half are too large by on the tensor cores; x is as much smaller there."""
FLOAT_OF_INT = tl.constexpr(0x4B400000)
"""1.5 · 2^23 as float32: a small integer added to its bits is the float 12582912 + integer."""
SWAP_1 = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;")
SWAP_2 = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;")


@triton.jit
def byte_of(word, T: tl.constexpr):
    """Byte T of each word, signed."""
    return (word << (24 - 8 * T)) >> 24


@triton.jit
def look_up(word, t_0, t_1, t_2, t_3):
    """Entries of a table at the lower four of a word's eight places."""
    if IS_INTERPRETED:
        result = word & 0
        for t in tl.static_range(4):
            place = (word >> (4 * t)) & 15
            lower, upper = tl.where(place >= 4, t_1, t_0), tl.where(place >= 12, t_3, t_2)
            entry = tl.where(place >= 8, upper, lower)
            result |= ((entry >> (8 * (place & 3))) & 255) << (8 * t)
        return result
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP_ASSEMBLY, "=r,r,r,r,r,r", [word, t_0, t_1, t_2, t_3], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def look_up_both(word, t_0, t_1, t_2, t_3, IS_POSITIVE: tl.constexpr):
    """Entries of a table at a word's lower and upper four places; IS_POSITIVE: the table has no negative ones."""
    if IS_INTERPRETED:
        return look_up(word, t_0, t_1, t_2, t_3), look_up(word >> 16, t_0, t_1, t_2, t_3)
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP_POSITIVE if IS_POSITIVE else LOOK_UP_BOTH, "=&r,=&r,r,r,r,r,r", [word, t_0, t_1, t_2, t_3],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def four_of(x):
    """[n, 4] → four of [n]; nothing moves where a thread holds all four."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def load_four(pointer, at):
    """Four neighbors from each place on, as four tensors; of weights, which nobody reads again."""
    return four_of(tl.load(pointer + at[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first"))


@triton.jit
def load_two(pointer, at):
    """The same of two."""
    return tl.split(tl.load(pointer + at[:, None] + tl.arange(0, 2)[None, :]))


@triton.jit
def four_at(pointers):
    """Four neighbors from where each points."""
    return four_of(tl.load(pointers[:, None] + tl.arange(0, 4)[None, :]))


@triton.jit
def to_float(number):
    """A float32 of an integer below 2^22; the GPU's own conversion is many times slower."""
    return (number + FLOAT_OF_INT).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def half_of(pair, H: tl.constexpr):
    """One float16 of an int32 that holds two, as float32."""
    return ((pair >> (16 * H)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


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
def bytes_of(w, high, second, t_0, t_1, t_2, t_3, S: tl.constexpr, H: tl.constexpr, FORM: tl.constexpr):
    """Half H of words of unit S of a block as words of four signed bytes, before the offset.

    high: the words with upper bits that belong to units 0 and 1 (or to all four), second: those of units 2 and 3.
    """
    if FORM == BYTE:
        return w
    elif FORM == TABLE:
        return look_up(w >> (16 * H), t_0, t_1, t_2, t_3)
    elif FORM == NIBBLE_1:
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((high >> (2 * S + H)) & 0x01010101) << 4)
    elif FORM == NIBBLE_2:
        own = second if S >= 2 else high
        return ((w >> (4 * H)) & 0x0F0F0F0F) | (((own >> (4 * (S % 2) + 2 * H)) & 0x03030303) << 4)
    else:
        return (w >> (4 * H)) & 0x0F0F0F0F


@triton.jit
def swapped(x, HOW: tl.constexpr):
    """Each thread's number in the thread whose place differs by one bit."""
    return tl.inline_asm_elementwise(HOW, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def quad_total(x):
    """The sum over each four neighbors, at all four of them."""
    sums = tl.sum(tl.reshape(x, [x.shape[0] // 4, 4]), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], [x.shape[0] // 4, 4]), [x.shape[0]])


@triton.jit
def quad_sum(x_0, x_1, x_2, x_3, place):
    """Sums over the four threads of a quad: thread i of it gets the sum of x_i."""
    if IS_INTERPRETED:
        low, high = tl.where(place == 0, quad_total(x_0), quad_total(x_1)), quad_total(x_2)
        return tl.where(place < 2, low, tl.where(place == 2, high, quad_total(x_3)))
    else:
        is_odd, is_high = place % 2 == 1, place >= 2
        near = tl.where(is_odd, x_1, x_0) + swapped(tl.where(is_odd, x_0, x_1), SWAP_1)
        far = tl.where(is_odd, x_3, x_2) + swapped(tl.where(is_odd, x_2, x_3), SWAP_1)
        return tl.where(is_high, far, near) + swapped(tl.where(is_high, near, far), SWAP_2)


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
