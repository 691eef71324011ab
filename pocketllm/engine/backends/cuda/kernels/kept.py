"""What a paged cache keeps of a head's key or value: its numbers, and where those have eight bits a scale beside them.

Scales lie as [blocks, heads, block_size]: a tile of one head's are neighbors. They never meet the numbers: those of
keys are factors of scores, those of values of weights. So what is multiplied are whole numbers up to 127, or numbers of
four bits times a power of two, up to 448: float16 has both exactly.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.words import FLOAT_OF_INT


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
