"""Several rows of x on the tensor cores: codes as float16 without a conversion, and sums of their products.

`add_block` is what mixtures multiply by, rows of x having a scale for each unit; `several` has one for each row.
Fragments are those of `mma.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). Triton's
interpreter has no inline assembly, so what is one instruction on the GPU is spelled out for it.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.fetch import opened
from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    HALVES,
    NIBBLE_1,
    NIBBLE_2,
    TABLE,
    K,
    four_at,
    half_of,
    look_up,
)

ULPS = tl.constexpr(16777216.0)
"""2^24: an integer up to 1023 in the low bits of a float16 is a subnormal, and as many times 2^-24."""
OF_0, OF_1, OF_2, OF_3 = (tl.constexpr(f"shfl.sync.idx.b32 $0, $1, {step}, 0x1c1f, 0xffffffff;") for step in range(4))
MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@triton.jit
def halves_of(w, v, high, t_0, t_1, t_2, t_3, S: tl.constexpr, FORM: tl.constexpr):
    """Eight codes of unit S of a block in pairs of float16: of the first half values 0 and 2, then 1 and 3; of the
    second the same, times SECOND.

    w: the unit's word, v: its second one of bytes; high: the word with its upper bits. Of bytes and places in a table
    a value is its code + 128; in the second half, + 1152.
    """
    if (FORM == BYTE) or (FORM == TABLE):
        if FORM == BYTE:
            w, v = w ^ -2139062144, v ^ -2139062144  # 0x80 in each byte
        else:
            first = look_up(w, t_0, t_1, t_2, t_3)
            w, v = first, look_up(w >> 16, t_0, t_1, t_2, t_3)
        # 0x1400 is 2^-10, whose last place is worth 2^-20
        p_0, p_1 = w & 0x00FF00FF, (w >> 8) & 0x00FF00FF
        return p_0, p_1, (v & 0x00FF00FF) | 0x14001400, ((v >> 8) & 0x00FF00FF) | 0x14001400
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
        return p_0, p_1, p_2, p_3


@triton.jit
def moved(word, RIGHT: tl.constexpr):
    """Bits moved right, or left."""
    if RIGHT >= 0:
        return word >> RIGHT
    else:
        return word << (-RIGHT)


@triton.jit
def mma(a_0, a_1, a_2, a_3, b_0, b_1, c):
    """c + a · bᵀ of a warp: 16 rows of 16 float16 with 8 rows; of row gid and columns 2 tid, 2 tid + 1, then of row
    gid + 8. a: pairs of rows gid, gid + 8, gid, gid + 8; b: pairs of row gid."""
    if IS_INTERPRETED:
        near_0, near_1 = columns_of(a_0, a_2, b_0, b_1)
        far_0, far_1 = columns_of(a_1, a_3, b_0, b_1)
        return c[0] + near_0, c[1] + near_1, c[2] + far_0, c[3] + far_1
    else:
        return tl.inline_asm_elementwise(
            MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a_0, a_1, a_2, a_3, b_0, b_1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def columns_of(a, a_next, b, b_next):
    """Products of each thread's row with its two columns, summed over the quad's pairs."""
    warps: tl.constexpr = a.shape[0] // 32
    total = tl.zeros([warps, 8, 8], tl.float32)
    for h in tl.static_range(2):
        total += tl.sum(tl.reshape(half_of(a, h), [warps, 8, 1, 4]) * tl.reshape(half_of(b, h), [warps, 1, 8, 4]), 3)
        some = tl.reshape(half_of(a_next, h), [warps, 8, 1, 4])
        total += tl.sum(some * tl.reshape(half_of(b_next, h), [warps, 1, 8, 4]), 3)
    even, odd = tl.split(tl.reshape(total, [warps, 8, 4, 2]))
    return tl.reshape(even, [warps * 32]), tl.reshape(odd, [warps * 32])


@triton.jit
def of_step(x, STEP: tl.constexpr):
    """A float32 of thread STEP of each quad, at all four."""
    if IS_INTERPRETED:
        quads: tl.constexpr = x.shape[0] // 4
        own = tl.reshape(x, [quads, 4])
        own = tl.sum(tl.where(tl.arange(0, 4)[None, :] == STEP, own, 0.0), 1)
        return tl.reshape(tl.broadcast_to(own[:, None], [quads, 4]), [quads * 4])
    else:
        number = x.to(tl.int32, bitcast=True)
        if STEP == 0:
            number = tl.inline_asm_elementwise(OF_0, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
        elif STEP == 1:
            number = tl.inline_asm_elementwise(OF_1, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
        elif STEP == 2:
            number = tl.inline_asm_elementwise(OF_2, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
        else:
            number = tl.inline_asm_elementwise(OF_3, "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)
        return number.to(tl.float32, bitcast=True)


@triton.jit
def codes_of(w, t_0, t_1, t_2, t_3, STEP: tl.constexpr, FORM: tl.constexpr):
    """Codes of unit STEP of a tile's near and far row."""
    near, far = w[0], w[1]
    return (
        halves_of(near[0][STEP], near[1][STEP], near[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM),
        halves_of(far[0][STEP], far[1][STEP], far[2][STEP // 2], t_0, t_1, t_2, t_3, STEP, FORM),
    )


@triton.jit
def in_ulps(scales, is_in, IS_EVEN: tl.constexpr):
    """Scales for codes in the low bits of a float16; zeros past the last block."""
    scale, minimum, second, second_minimum = scales
    if not IS_EVEN:
        scale, minimum = tl.where(is_in, scale, 0.0), tl.where(is_in, minimum, 0.0)
        second, second_minimum = tl.where(is_in, second, 0.0), tl.where(is_in, second_minimum, 0.0)
    return scale * ULPS, minimum, second * ULPS, second_minimum


@triton.jit
def of_unit(scales, STEP: tl.constexpr, GROUP: tl.constexpr, HAS_MIN: tl.constexpr):
    """Scales and minimums that thread STEP of each quad has."""
    first = of_step(scales[0], STEP)
    minimum = first
    if HAS_MIN:
        minimum = of_step(scales[1], STEP)
    second, second_minimum = first, minimum
    if GROUP == 16:
        second = of_step(scales[2], STEP)
        if HAS_MIN:
            second_minimum = of_step(scales[3], STEP)
    return first, minimum, second, second_minimum


@triton.jit
def fetch_columns(x, marks, HAS_HALVES: tl.constexpr):
    """A thread's pairs of a unit of 8 rows of x, and its two columns' scales and sums (and both halves')."""
    x_0, x_1, t_0, t_1 = four_at(marks)
    t = (t_0, t_1, t_0, t_1)
    if HAS_HALVES:
        t = four_at(marks + 4)
    return four_at(x), (x_0, x_1), (t_0, t_1), t


@triton.jit
def scaled(acc, d, scale, minimum, total, x_scale, HAS_MIN: tl.constexpr):
    """acc + x_scale · (scale · d - minimum · total)."""
    value = scale * d
    if HAS_MIN:
        value = tl.fma(-minimum, total, value)
    return tl.fma(x_scale, value, acc)


@triton.jit
def add_group(acc, d, near, near_min, far, far_min, totals, x_scales, HAS_MIN: tl.constexpr):
    """Add a group's sums of products, of 16 rows and 8 rows of x."""
    acc_0, acc_1, acc_2, acc_3 = acc
    acc_0 = scaled(acc_0, d[0], near, near_min, totals[0], x_scales[0], HAS_MIN)
    acc_1 = scaled(acc_1, d[1], near, near_min, totals[1], x_scales[1], HAS_MIN)
    acc_2 = scaled(acc_2, d[2], far, far_min, totals[0], x_scales[0], HAS_MIN)
    acc_3 = scaled(acc_3, d[3], far, far_min, totals[1], x_scales[1], HAS_MIN)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def add_columns(
    acc, a, b, near, far, columns,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, FORM: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """Add one unit of 16 rows (a near, b far) times 8 rows of x. Sums begin with what makes codes of offset ones."""
    x, x_scales, totals, halves = columns
    is_biased: tl.constexpr = (FORM == BYTE) or (FORM == TABLE)
    first: tl.constexpr = (OFFSET + (128 if is_biased else 0)) / ULPS
    last: tl.constexpr = (OFFSET + (1152 if is_biased else 0)) / ULPS
    zero = tl.zeros([x[0].shape[0]], tl.float32)
    low = (zero, zero, zero, zero)
    if first != 0:
        of_0, of_1 = halves[0] * -first, halves[1] * -first
        if GROUP == 32:
            if is_biased:
                of_0, of_1 = tl.fma(halves[2], -last, of_0), tl.fma(halves[3], -last, of_1)
            else:
                of_0, of_1 = totals[0] * -first, totals[1] * -first
        low = (of_0, of_1, of_0, of_1)
    low = mma(a[0], b[0], a[1], b[1], x[0], x[1], low)
    if GROUP == 32:
        low = mma(a[2], b[2], a[3], b[3], x[2], x[3], low)
        return add_group(acc, low, near[0], near[1], far[0], far[1], totals, x_scales, HAS_MIN)
    else:
        acc = add_group(acc, low, near[0], near[1], far[0], far[1], (halves[0], halves[1]), x_scales, HAS_MIN)
        of_0, of_1 = zero, zero
        if last != 0:
            of_0, of_1 = halves[2] * -last, halves[3] * -last
        up = mma(a[2], b[2], a[3], b[3], x[2], x[3], (of_0, of_1, of_0, of_1))
        totals = (halves[2], halves[3])
        return add_group(acc, up, near[2], near[3], far[2], far[3], totals, x_scales, HAS_MIN)


@triton.jit
def add_block(
    sums, w, x, marks, is_in, t_0, t_1, t_2, t_3, units: tl.constexpr, OFFSET: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add a warp's 16 rows of a block times all rows of x; sums: of each eight of them."""
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    has_halves: tl.constexpr = (GROUP == 16) or (FORM == BYTE) or (FORM == TABLE)
    near_scales = in_ulps(opened(w[2], GROUP, SCALES), is_in, IS_EVEN)
    far_scales = in_ulps(opened(w[3], GROUP, SCALES), is_in, IS_EVEN)
    p_0, p_1, p_2, p_3 = sums
    for step in tl.static_range(4):
        a, b = codes_of(w, t_0, t_1, t_2, t_3, step, FORM)
        near, far = of_unit(near_scales, step, GROUP, has_min), of_unit(far_scales, step, GROUP, has_min)
        x_step, marks_step = x + step * 128, marks + step * 32
        some = fetch_columns(x_step, marks_step, has_halves)
        p_0 = add_columns(p_0, a, b, near, far, some, GROUP, OFFSET, FORM, has_min)
        if COLUMNS > 1:
            some = fetch_columns(x_step + units * 128, marks_step + units * 32, has_halves)
            p_1 = add_columns(p_1, a, b, near, far, some, GROUP, OFFSET, FORM, has_min)
        if COLUMNS > 2:
            some = fetch_columns(x_step + 2 * units * 128, marks_step + 2 * units * 32, has_halves)
            p_2 = add_columns(p_2, a, b, near, far, some, GROUP, OFFSET, FORM, has_min)
        if COLUMNS > 3:
            some = fetch_columns(x_step + 3 * units * 128, marks_step + 3 * units * 32, has_halves)
            p_3 = add_columns(p_3, a, b, near, far, some, GROUP, OFFSET, FORM, has_min)
    return p_0, p_1, p_2, p_3


@triton.jit
def tile_of(acc, TILES: tl.constexpr, SHARES: tl.constexpr):
    """Sums over the warps that share rows: [8 rows of x, rows of the program]."""
    four = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))  # [threads, row half, column]
    sums = tl.sum(tl.reshape(four, [SHARES, TILES, 8, 4, 2, 2]), 0)
    return tl.reshape(tl.permute(sums, (2, 4, 0, 3, 1)), [8, TILES * 16])
