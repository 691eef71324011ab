"""Heads of queries and keys: normed, rotated, and kept; angles of a step."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.kept import keep, narrowed
from pocketllm.engine.backends.cuda.kernels.launch import wait

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
