"""Up to eight rows times a packed matrix on the tensor cores, every weight read once.

A thread works by itself here: tensors have one element for each thread, and one assembly instruction multiplies a
warp's 16 rows of 32 (or 16) codes with 8 rows of x. Part h of word i of a group is just what thread i of a quad holds
of the left operand (PTX ISA, "Matrix Fragments for mma.m16n8k32"): a quad reads four groups and trades words. The warps
of a block take turns at the groups of a row. Triton's interpreter cannot run this; it has `gemv`, whose results differ
in the order of sums alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels import words
from pocketllm.engine.backends.cuda.kernels.launch import OPTIONS, wait
from pocketllm.engine.backends.cuda.kernels.words import HALVES, K, bytes_of, load_scales, scales_of, to_float
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed

MAX_ROWS = 8
FEW_ROWS, MANY_ROWS = 4096, 16384
"""Rows of a matrix up to which 16 warps a block are fastest, and from which on 4 are; between them 8."""
AT_ONCE = tl.constexpr(4)
"""Groups that a warp takes together: a quad's four threads read one each, and then trade words."""
SWAP_1 = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;")
SWAP_2 = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;")
OF_0, OF_1, OF_2, OF_3 = (tl.constexpr(f"shfl.sync.idx.b32 $0, $1, {step}, 0x1c1f, 0xffffffff;") for step in range(4))
MMA_32 = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$10,$10,$10};"
)
MMA_16 = tl.constexpr("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$7,$7,$7};")


@triton.jit
def mma(a_0, a_1, a_2, a_3, b_0, b_1, GROUP: tl.constexpr):
    """Sums of a warp's 16 rows times 8 rows: of row gid and columns 2 tid, 2 tid + 1, then of row gid + 8."""
    zero = a_0 & 0
    if GROUP == 32:
        return tl.inline_asm_elementwise(
            MMA_32, "=r,=r,=r,=r,r,r,r,r,r,r,r", [a_0, a_1, a_2, a_3, b_0, b_1, zero],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            MMA_16, "=r,=r,=r,=r,r,r,r,r", [a_0, a_1, b_0, zero],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def swap(x, HOW: tl.constexpr):
    """Each thread's number in the thread whose place differs by one bit."""
    return tl.inline_asm_elementwise(HOW, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def traded(w, tid):
    """Word tid of each of a quad's four groups, from the four words of group tid: [threads, 4] → four of [threads]."""
    even, odd = tl.split(tl.reshape(w, [w.shape[0], 2, 2]))
    w_0, w_2 = tl.split(even)
    w_1, w_3 = tl.split(odd)
    is_even, is_low = tid % 2 == 0, tid < 2
    near, far = swap(tl.where(is_even, w_1, w_0), SWAP_1), swap(tl.where(is_even, w_3, w_2), SWAP_1)
    w_0, w_1 = tl.where(is_even, w_0, near), tl.where(is_even, near, w_1)
    w_2, w_3 = tl.where(is_even, w_2, far), tl.where(is_even, far, w_3)
    near, far = swap(tl.where(is_low, w_2, w_0), SWAP_2), swap(tl.where(is_low, w_3, w_1), SWAP_2)
    w_0, w_2 = tl.where(is_low, w_0, near), tl.where(is_low, near, w_2)
    w_1, w_3 = tl.where(is_low, w_1, far), tl.where(is_low, far, w_3)
    return w_0, w_1, w_2, w_3


@triton.jit
def of_step(x, STEP: tl.constexpr):
    """A float32 of thread STEP of each quad."""
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
def fetch_row(
    w_words, w_scales, w_shared, row, first, tid,
    groups: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    PER_SHARED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """What memory has of four groups of a thread's row from `first` on; not looked at yet, so that nothing waits.

    Of 32 values: the words of group tid of the four (of bytes, also those of its second half); of 16: a word of each
    group. Then the scales of group tid.
    """
    g = tl.minimum(first + tid, groups - 1)
    tile, r = row // TILE, row % TILE
    shared_groups: tl.constexpr = groups // PER_SHARED
    own, both = load_scales(
        w_scales, w_shared, (tile * groups + g) * TILE + r, (tile * shared_groups + g // PER_SHARED) * TILE + r, SCALES
    )
    if GROUP == 32:
        at = (row * groups + g)[:, None] * WORDS + tl.arange(0, 4)[None, :]
        w_0 = tl.load(w_words + at)
        w_1 = w_0
        if PARTS == 1:
            w_1 = tl.load(w_words + at + 4)
        return w_0, w_1, w_0, w_0, own, both
    else:
        at = row * groups * WORDS + tid % WORDS
        w_0 = tl.load(w_words + at + tl.minimum(first, groups - 1) * WORDS)
        w_1 = tl.load(w_words + at + tl.minimum(first + 1, groups - 1) * WORDS)
        w_2 = tl.load(w_words + at + tl.minimum(first + 2, groups - 1) * WORDS)
        w_3 = tl.load(w_words + at + tl.minimum(first + 3, groups - 1) * WORDS)
        return w_0, w_1, w_2, w_3, own, both


@triton.jit
def opened(fetched, tid, GROUP: tl.constexpr, PARTS: tl.constexpr, SCALES: tl.constexpr):
    """A thread's words of each of the four groups, of bytes also of their second halves; scale and minimum of group
    tid."""
    scale, minimum = scales_of(fetched[4], fetched[5], SCALES)
    if GROUP == 32:
        w_0, w_1, w_2, w_3 = traded(fetched[0], tid)
        v_0, v_1, v_2, v_3 = w_0, w_1, w_2, w_3
        if PARTS == 1:
            v_0, v_1, v_2, v_3 = traded(fetched[1], tid)
        return w_0, w_1, w_2, w_3, v_0, v_1, v_2, v_3, scale, minimum
    else:
        w_0, w_1, w_2, w_3 = fetched[0], fetched[1], fetched[2], fetched[3]
        return w_0, w_1, w_2, w_3, w_0, w_1, w_2, w_3, scale, minimum


@triton.jit
def row_codes(w, w_second, w_high, row, g, tid, t_0, t_1, t_2, t_3, groups: tl.constexpr, GROUP: tl.constexpr,
              WORDS: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """What a thread holds of its row's group: values 4 tid and on, and (of 32) 16 + 4 tid and on."""
    high = w
    if (FORM == words.NIBBLE_1) or (FORM == words.NIBBLE_2):
        high = tl.load(w_high + row * groups + g)
    if GROUP == 16:
        first = bytes_of(w, high, tid % WORDS, t_0, t_1, t_2, t_3, tid // WORDS, FORM)
        return first, first
    elif PARTS == 2:
        first = bytes_of(w, high, tid, t_0, t_1, t_2, t_3, 0, FORM)
        return first, bytes_of(w, high, tid, t_0, t_1, t_2, t_3, 1, FORM)
    else:
        return w, w_second


@triton.jit
def tile_step(
    acc_0, acc_1, acc_2, acc_3, w, w_second, near, near_min, v, v_second, far, far_min, w_high, row, far_row, g, tid,
    b_0, b_1, total_0, total_1, x_scale_0, x_scale_1, t_0, t_1, t_2, t_3,
    groups: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Add one group of a warp's 16 rows; near, far: what is of the thread's first row and of that 8 on."""
    has_min: tl.constexpr = (SCALES == HALVES) or (SCALES == K)
    a_0, a_2 = row_codes(w, w_second, w_high, row, g, tid, t_0, t_1, t_2, t_3, groups, GROUP, WORDS, PARTS, FORM)
    a_1, a_3 = row_codes(v, v_second, w_high, far_row, g, tid, t_0, t_1, t_2, t_3, groups, GROUP, WORDS, PARTS, FORM)
    d_0, d_1, d_2, d_3 = mma(a_0, a_1, a_2, a_3, b_0, b_1, GROUP)
    if OFFSET != 0:
        d_0, d_1, d_2, d_3 = (
            d_0 - OFFSET * total_0, d_1 - OFFSET * total_1, d_2 - OFFSET * total_0, d_3 - OFFSET * total_1,
        )  # fmt: skip
    v_0, v_1, v_2, v_3 = near * to_float(d_0), near * to_float(d_1), far * to_float(d_2), far * to_float(d_3)
    if has_min:
        sum_0, sum_1 = to_float(total_0), to_float(total_1)
        v_0, v_1 = tl.fma(-near_min, sum_0, v_0), tl.fma(-near_min, sum_1, v_1)
        v_2, v_3 = tl.fma(-far_min, sum_0, v_2), tl.fma(-far_min, sum_1, v_3)
    acc_0, acc_1 = tl.fma(x_scale_0, v_0, acc_0), tl.fma(x_scale_1, v_1, acc_1)
    acc_2, acc_3 = tl.fma(x_scale_0, v_2, acc_2), tl.fma(x_scale_1, v_3, acc_3)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def store_tile(
    acc_0, acc_1, acc_2, acc_3, y, bias, residual, first_row, rows, x_rows, y_stride, residual_stride,
    WARPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sum over the warps of a block, and write a tile of 16 rows by 8."""
    four = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))  # [threads, row half, column]
    sums = tl.sum(tl.reshape(four, [WARPS, 32, 2, 2]), 0)
    lane = tl.arange(0, 32)[:, None, None]
    n = first_row + lane // 4 + 8 * tl.arange(0, 2)[None, :, None]
    m = 2 * (lane % 4) + tl.arange(0, 2)[None, None, :]
    is_out = (n < rows) & (m < x_rows)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < rows, other=0.0)
    if HAS_RESIDUAL:
        sums += tl.load(residual + m * residual_stride + n, mask=is_out, other=0.0)
    tl.store(y + m * y_stride + n, sums, mask=is_out)


@triton.jit
def mma_kernel(
    x, x_scales, w_words, w_high, w_scales, w_shared, y, bias, residual, x_rows, y_stride, residual_stride, rows,
    last_row, t_0, t_1, t_2, t_3,
    groups: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, PER_SHARED: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ w[n] · x[m] (+ bias[n]) (+ residual[m, n]) for 16 rows n and all rows m, 8 at most.

    x, x_scales: in the order of `rows.write_rows(…, in_fragments=True)`.
    """
    group: tl.constexpr = 4 * WORDS * PARTS
    wants_total: tl.constexpr = (SCALES == HALVES) or (SCALES == K) or OFFSET != 0
    thread = tl.arange(0, 32 * WARPS)
    warp, lane, gid, tid = thread // 32, thread % 32, thread % 32 // 4, thread % 4
    first_row = tl.program_id(0) * 16
    row, far_row = tl.minimum(first_row + gid, last_row), tl.minimum(first_row + 8 + gid, last_row)
    zero = tl.zeros([32 * WARPS], tl.float32)
    p_0, p_1, p_2, p_3 = zero, zero, zero, zero
    pair = tl.arange(0, 2)[None, :]
    stride: tl.constexpr = AT_ONCE * WARPS
    mine = warp * AT_ONCE
    near_words = fetch_row(
        w_words, w_scales, w_shared, row, mine, tid,
        groups, group, TILE, WORDS, PARTS, PER_SHARED, SCALES,
    )  # fmt: skip
    far_words = fetch_row(
        w_words, w_scales, w_shared, far_row, mine, tid,
        groups, group, TILE, WORDS, PARTS, PER_SHARED, SCALES,
    )  # fmt: skip
    wait()
    for first in tl.range(0, groups, stride):
        next_near = fetch_row(
            w_words, w_scales, w_shared, row, first + stride + mine, tid,
            groups, group, TILE, WORDS, PARTS, PER_SHARED, SCALES,
        )  # fmt: skip
        next_far = fetch_row(
            w_words, w_scales, w_shared, far_row, first + stride + mine, tid,
            groups, group, TILE, WORDS, PARTS, PER_SHARED, SCALES,
        )  # fmt: skip
        near, far = opened(near_words, tid, group, PARTS, SCALES), opened(far_words, tid, group, PARTS, SCALES)
        for step in tl.static_range(AT_ONCE):
            own = first + mine + step
            g = tl.minimum(own, groups - 1)
            x_group = g * group // 32
            if group == 32:
                b_0, b_1 = tl.split(tl.load(x + ((x_group * 32 + lane) * 2)[:, None] + pair))
            else:
                b_0 = tl.load(x + (x_group * 32 + lane) * 2 + g % 2)
                b_1 = b_0
            x_scale_0, x_scale_1 = tl.split(tl.load(x_scales + (x_group * 8 + 2 * tid)[:, None] + pair))
            if groups % stride != 0:
                x_scale_0 = tl.where(own < groups, x_scale_0, 0.0)
                x_scale_1 = tl.where(own < groups, x_scale_1, 0.0)
            total_0, total_1 = b_0, b_0
            if wants_total:
                ones = b_0 * 0 + 0x01010101
                total_0, total_1, _, _ = mma(ones, ones, ones, ones, b_0, b_1, group)
            p_0, p_1, p_2, p_3 = tile_step(
                p_0, p_1, p_2, p_3, near[step], near[4 + step], of_step(near[8], step), of_step(near[9], step),
                far[step], far[4 + step], of_step(far[8], step), of_step(far[9], step), w_high, row, far_row, g, tid,
                b_0, b_1, total_0, total_1, x_scale_0, x_scale_1, t_0, t_1, t_2, t_3,
                groups, OFFSET, group, WORDS, PARTS, FORM, SCALES,
            )  # fmt: skip
        near_words, far_words = next_near, next_far
    store_tile(
        p_0, p_1, p_2, p_3, y, bias, residual, first_row, rows, x_rows, y_stride, residual_stride,
        WARPS, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def multiply(
    x: Tensor,
    x_scales: Tensor,
    packed: Packed,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    num_warps: int | None = None,
) -> None:
    """As `gemv.multiply`, with x and its scales in the order of fragments."""
    layout, groups = packed.layout, packed.scales.shape[1]
    num_warps = num_warps or (4 if packed.rows >= MANY_ROWS else 16 if packed.rows <= FEW_ROWS else 8)
    for at in range(0, len(y), MAX_ROWS):
        count, block = min(MAX_ROWS, len(y) - at), at // MAX_ROWS
        out = y[at : at + count]
        added = None if residual is None else residual[at : at + count]
        mma_kernel[(-(-packed.rows // 16),)](
            x[block], x_scales[block], packed.words, packed.high, packed.scales, packed.shared,
            out, out if bias is None else bias, out if added is None else added,
            count, out.stride(0), 0 if added is None else added.stride(0), packed.rows, len(packed.words) - 1,
            *layout.packed_table,
            groups=groups, OFFSET=layout.offset, TILE=TILE_ROWS, WARPS=num_warps, WORDS=layout.words,
            PARTS=layout.parts, PER_SHARED=1 if packed.shared.ndim == 1 else groups // packed.shared.shape[1],
            FORM=int(layout.form), SCALES=int(layout.scales), HAS_BIAS=bias is not None,
            HAS_RESIDUAL=added is not None, num_warps=num_warps, enable_fp_fusion=False, **OPTIONS,
        )  # fmt: skip
