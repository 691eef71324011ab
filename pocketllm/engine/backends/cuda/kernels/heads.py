"""Heads of queries and keys: normed, rotated, and kept; angles of a step.

Where a cache's numbers have eight bits, a head's key has a scale, and its value another. Scales lie as [blocks, heads,
block_size]: a tile of one head's are neighbors. They never meet the numbers: those of keys are factors of scores,
those of values of weights. So what is multiplied are whole numbers up to 127, or numbers of four bits times a power of
two, up to 448: float16 has both exactly.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import FLOAT_OF_INT

NO_ROTATION, ADJACENT, HALF_SPLIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LAST, LAST_BACK = tl.constexpr(3), tl.constexpr(4)
"""The last values of a head as neighbors, and the same back by its angles."""


@triton.jit
def angles_kernel(positions, inv_freq, out, magnitude, num_freq, BLOCK: tl.constexpr):
    """out[t, 0 | 1, f] = magnitude · cos | sin of position · inv_freq, the angle in float64 before it is rounded."""
    wait()
    token = tl.program_id(0)
    f = tl.arange(0, BLOCK)
    is_in = f < num_freq
    position = tl.load(positions + token).to(tl.float64)
    angle = position * tl.load(inv_freq + f, mask=is_in, other=0.0).to(tl.float64)
    to = out + token * 2 * num_freq + f
    tl.store(to, (tl.cos(angle) * magnitude).to(tl.float32), mask=is_in)
    tl.store(to + num_freq, (tl.sin(angle) * magnitude).to(tl.float32), mask=is_in)


@triton.jit
def read_heads(
    x, at, token, is_row, weight, eps, angles, num_freq,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Heads that begin at x + at, [rows, BLOCK] in float32, normed by weight and rotated by their tokens' angles.

    at, token, is_row: [rows, 1]; past DIM and where is_row is false, zeros.
    """
    d = tl.arange(0, BLOCK)[None, :]
    is_in = (d < DIM) & is_row
    value = tl.load(x + at + d, mask=is_in, other=0.0)
    if HAS_NORM:
        factor = 1 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
        value = value * factor[:, None] * tl.load(weight + d, mask=d < DIM, other=0.0)
    if ROTATION != NO_ROTATION:
        turning = d < 2 * num_freq
        if ROTATION == ADJACENT:
            partner, f, is_first = d ^ 1, d // 2, d % 2 == 0
        elif ROTATION == HALF_SPLIT:
            is_first = d < num_freq
            partner, f = tl.where(is_first, d + num_freq, d - num_freq), tl.where(is_first, d, d - num_freq)
        else:
            at_end = d - (DIM - 2 * num_freq)
            partner, f, is_first = d - at_end + (at_end ^ 1), at_end // 2, at_end % 2 == 0
            turning = (at_end >= 0) & (d < DIM)
        turns = turning & is_row
        other = tl.load(x + at + partner, mask=turns, other=0.0)
        if HAS_NORM:
            other = other * factor[:, None] * tl.load(weight + partner, mask=turning, other=0.0)
        cos = tl.load(angles + token * 2 * num_freq + f, mask=turns, other=0.0)
        sin = tl.load(angles + token * 2 * num_freq + num_freq + f, mask=turns, other=0.0)
        if ROTATION == LAST_BACK:
            sin = -sin
        value = tl.where(turns, value * cos + tl.where(is_first, -other, other) * sin, value)
    return value


@triton.jit
def heads_kernel(
    x, weight, angles, out, x_stride, heads, eps, num_freq,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """One head of one token, written out in float32."""
    wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.full([1, 1], 0, tl.int64)
    value = read_heads(
        x, one + token * x_stride + head * DIM, one + token, one == 0, weight, eps, angles, num_freq,
        DIM, BLOCK, HAS_NORM, ROTATION,
    )  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    tl.store(out + (token * heads + head) * DIM + d, value, mask=d < DIM)


@triton.jit
def multiplied(x, cache):
    """As tensor cores are given it: in float16 where the cache has eight bits, otherwise as the cache has it."""
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        return x.to(tl.float16)
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def narrowed(x, cache):
    """A head's numbers [1, width] as the cache keeps them, and the scale [1] that gives them back, which is 1 unless
    they have eight bits: then the largest becomes the largest of its type."""
    kind: tl.constexpr = cache.dtype.element_ty
    if kind.primitive_bitwidth == 8:
        most: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
        largest = tl.max(tl.abs(x), 1)
        scale = tl.div_rn(largest, most)
        x = x * tl.where(largest > 1e-30, tl.div_rn(most, tl.maximum(largest, 1e-30)), 0.0)[:, None]
        if kind == tl.int8:
            # the float 12582912 + integer has the integer, rounded to the nearest, in its low bits
            codes = (x + 12582912.0).to(tl.int32, bitcast=True) - FLOAT_OF_INT
            return codes.to(kind), scale
        else:
            # rounded to the nearest multiple of an eighth of its power of two, 2^-9 at least, before it is converted:
            # Triton's interpreter loses the carry
            power = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
            large = (((power + 20) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
            return ((x + large) - large).to(kind), scale
    else:
        return x.to(kind), tl.full([1], 1.0, tl.float32)


@triton.jit
def keep(
    cache, scales, numbers, scale, slot, head, heads, BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr
):
    """Put what `narrowed` gave of one head at a slot of the cache; nowhere where that is below 0."""
    d = tl.arange(0, D_BLOCK)[None, :]
    tl.store(cache + (slot * heads + head) * DIM + d, numbers, mask=(d < DIM) & (d * 0 + slot >= 0))
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        first = tl.arange(0, 1)
        to = scales + (slot // BLOCK * heads + head) * BLOCK + slot % BLOCK + first
        tl.store(to, scale, mask=first + slot >= 0)


@triton.jit
def scales_at(block, position, head, heads, BLOCK: tl.constexpr):
    """Where the scales of positions of blocks are, [positions]."""
    return (block.to(tl.int64) * heads + head) * BLOCK + position % BLOCK


@triton.jit
def score_scale(scale, keys, scales, is_in):
    """What scores of keys are multiplied by: the same for all, or times each one's own scale, [1, positions].

    scales: pointers to the keys', read where is_in is true.
    """
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        return scale * tl.load(scales, mask=is_in, other=0.0)[None, :]
    else:
        return scale


@triton.jit
def add_values(acc, weights, some, values, scales, is_in):
    """acc + weights · some, [rows, width]: a tile of values as `multiplied` has them.

    scales: pointers to theirs, read where is_in is true. A row's weights with them are divided by the largest, so that
    they fill float16's range; it is its own, of keys that it sees, whatever others the step has.
    """
    if values.dtype.element_ty.primitive_bitwidth == 8:
        weights *= tl.load(scales, mask=is_in, other=0.0)[None, :]
        largest = tl.maximum(tl.max(weights, 1), 1e-30)
        acc += tl.dot((weights * (1 / largest)[:, None]).to(some.dtype), some) * largest[:, None]
    else:
        acc = tl.dot(weights.to(some.dtype), some, acc)
    return acc


@triton.jit
def store_kernel(
    k, v, weight, angles, keys, values, key_scales, value_scales, slots, k_stride, v_stride, heads, eps, num_freq,
    DIM: tl.constexpr, BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Write one head's key and value of one token into the cache, of blocks of TOKENS; a token without a slot (-1) is
    left out."""
    wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    one = tl.full([1, 1], 0, tl.int64)
    key = read_heads(
        k, one + token * k_stride + head * DIM, one + token, one == 0, weight, eps, angles, num_freq,
        DIM, BLOCK, HAS_NORM, ROTATION,
    )  # fmt: skip
    numbers, scale = narrowed(key, keys)
    keep(keys, key_scales, numbers, scale, slot, head, heads, TOKENS, DIM, BLOCK)
    e = tl.arange(0, V_BLOCK)[None, :]
    value = tl.load(v + token * v_stride + head * V_DIM + e, mask=e < V_DIM, other=0.0)
    numbers, scale = narrowed(value, values)
    keep(values, value_scales, numbers, scale, slot, head, heads, TOKENS, V_DIM, V_BLOCK)
