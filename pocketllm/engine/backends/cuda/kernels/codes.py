"""Codes as the tensor cores take them: pairs of float16 that become so by masks alone, and numbers of a quad's threads.

A code in the low bits of a float16 is a subnormal, as many times 2^-24. A thread has the words of one place of a block
(`layouts`), whose pairs are those of a fragment of `mma.m16n8k16` and of `wgmma.m64k16` (PTX ISA). Triton's interpreter
has no inline assembly, so what is one instruction on the GPU is spelled out for it.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.kernels.words import BYTE, NIBBLE_1, NIBBLE_2, TABLE, half_of, look_up_both

ULPS = tl.constexpr(16777216.0)
"""2^24: what a code in the low bits of a float16 is too small by."""
OF_0, OF_1, OF_2, OF_3 = (tl.constexpr(f"shfl.sync.idx.b32 $0, $1, {step}, 0x1c1f, 0xffffffff;") for step in range(4))


@triton.jit
def codes_in(w, v, high, t_0, t_1, t_2, t_3, S: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """Eight codes of unit S of a block, less the offset, in pairs of float16: of the first half values 0 and 2, then 1
    and 3; of the second the same, times SECOND.

    w: the unit's word, v: its second one of bytes; high: the word with its upper bits.
    """
    if (FORM == BYTE) or (FORM == TABLE):
        if FORM == BYTE:
            w, v = w ^ -2139062144, v ^ -2139062144  # 0x80 in each byte: 128 more
        else:
            w, v = look_up_both(w, t_0, t_1, t_2, t_3, OFFSET != 0)
        # 0x1400 is 2^-10, whose last place is worth 2^-20
        p_0, p_1 = w & 0x00FF00FF, (w >> 8) & 0x00FF00FF
        p_2, p_3 = (v & 0x00FF00FF) | 0x14001400, ((v >> 8) & 0x00FF00FF) | 0x14001400
        biased: tl.constexpr = OFFSET if OFFSET != 0 else 128
        return less(p_0, biased), less(p_1, biased), less(p_2, biased + 0x1400), less(p_3, biased + 0x1400)
    else:
        odd = w >> 8
        p_0, p_1, p_2, p_3 = w & 0x000F000F, odd & 0x000F000F, w & 0x00F000F0, odd & 0x00F000F0
        if FORM == NIBBLE_1:
            p_0, p_1 = p_0 | (moved(high, 2 * S - 4) & 0x00100010), p_1 | (moved(high, 2 * S + 4) & 0x00100010)
            p_2, p_3 = p_2 | (moved(high, 2 * S - 7) & 0x01000100), p_3 | (moved(high, 2 * S + 1) & 0x01000100)
        if FORM == NIBBLE_2:
            at: tl.constexpr = 4 * (S % 2)
            p_0, p_1 = p_0 | (moved(high, at - 4) & 0x00300030), p_1 | (moved(high, at + 4) & 0x00300030)
            p_2, p_3 = p_2 | (moved(high, at - 6) & 0x03000300), p_3 | (moved(high, at + 2) & 0x03000300)
        return less(p_0, OFFSET), less(p_1, OFFSET), less(p_2, 16 * OFFSET), less(p_3, 16 * OFFSET)


@triton.jit
def table_without_signs(t_0, t_1, t_2, t_3, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """A table as `codes_in` takes it: with 128 more where it has negative entries, so that no byte has a sign."""
    if (FORM == TABLE) and (OFFSET == 0):
        return t_0 ^ -2139062144, t_1 ^ -2139062144, t_2 ^ -2139062144, t_3 ^ -2139062144
    else:
        return t_0, t_1, t_2, t_3


@triton.jit
def codes_of(w, t_0, t_1, t_2, t_3, STEP: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """Codes of unit STEP of a tile's near and far row."""
    near, far = w[0], w[1]
    return (
        codes_in(near[0][STEP], near[1][STEP], near[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM, OFFSET),
        codes_in(far[0][STEP], far[1][STEP], far[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM, OFFSET),
    )


@triton.jit
def moved(word, RIGHT: tl.constexpr):
    """Bits moved right, or left."""
    if RIGHT >= 0:
        return word >> RIGHT
    else:
        return word << (-RIGHT)


@triton.jit
def less(pair, BITS: tl.constexpr):
    """Two float16 less the one with these bits."""
    if BITS == 0:
        return pair
    negative: tl.constexpr = BITS * 65537 - 0x7FFF8000  # both signs set, as an int32
    if IS_INTERPRETED:
        other = (pair & 0) + negative
        return halves_in(half_of(pair, 0) + half_of(other, 0), half_of(pair, 1) + half_of(other, 1))
    else:
        return tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, negative], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def times(pair, other):
    """Two float16 times two others."""
    if IS_INTERPRETED:
        return halves_in(half_of(pair, 0) * half_of(other, 0), half_of(pair, 1) * half_of(other, 1))
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, other], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def halves_in(low, high):
    """Two float32 as float16 in an int32."""
    low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def of_step(number, STEP: tl.constexpr):
    """An int32 of thread STEP of each quad, at all four."""
    if IS_INTERPRETED:
        quads: tl.constexpr = number.shape[0] // 4
        own = tl.reshape(number, [quads, 4])
        own = tl.sum(tl.where(tl.arange(0, 4)[None, :] == STEP, own, 0), 1)
        return tl.reshape(tl.broadcast_to(own[:, None], [quads, 4]), [quads * 4])
    elif STEP == 0:
        return tl.inline_asm_elementwise(OF_0, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    elif STEP == 1:
        return tl.inline_asm_elementwise(OF_1, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    elif STEP == 2:
        return tl.inline_asm_elementwise(OF_2, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(OF_3, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def float_of_step(number, STEP: tl.constexpr):
    """The same of a float32."""
    return of_step(number.to(tl.int32, bitcast=True), STEP).to(tl.float32, bitcast=True)


@triton.jit
def of_unit(scales, STEP: tl.constexpr, GROUP: tl.constexpr, HAS_MIN: tl.constexpr):
    """Scales and minimums that thread STEP of each quad has (`fetch.opened`)."""
    first = float_of_step(scales[0], STEP)
    minimum = first
    if HAS_MIN:
        minimum = float_of_step(scales[1], STEP)
    second, second_minimum = first, minimum
    if GROUP == 16:
        second = float_of_step(scales[2], STEP)
        if HAS_MIN:
            second_minimum = float_of_step(scales[3], STEP)
    return first, minimum, second, second_minimum
