"""Values of packed rows, written out: rows of an embedding table, and tiles for the large matrix products."""

import triton
import triton.language as tl
from torch import Tensor

from pocketllm.engine.backends.cuda.kernels import words
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.words import HALVES, K, byte_of, bytes_of, group_scales, to_float
from pocketllm.engine.backends.cuda.layouts import TILE_ROWS
from pocketllm.engine.backends.cuda.packing import Packed

GROUPS_AT_ONCE = 32


@triton.jit
def unpack_kernel(
    w_words, w_high, w_scales, w_shared, index, out, first, count, factor, t_0, t_1, t_2, t_3,
    groups: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, PER_SHARED: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """out[o] = row first + o of the matrix, or factor · row index[o]; in out's dtype."""
    wait()
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = o < count
    if HAS_INDEX:
        row = tl.load(index + o, mask=is_row, other=0).to(tl.int64)
    else:
        row = first + tl.minimum(o, count - 1).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    own, g = g, tl.minimum(g, groups - 1)
    at = row[:, None, None] * groups + g[None, :, None]
    i = tl.arange(0, WORDS)[None, None, :]
    w = tl.load(w_words + at * WORDS + i)
    high = w
    if (FORM == words.NIBBLE_1) or (FORM == words.NIBBLE_2):
        high = tl.load(w_high + at)
    tile, r = (row // TILE)[:, None], (row % TILE)[:, None]
    scale, minimum = group_scales(
        w_scales, w_shared, (tile * groups + g[None, :]) * TILE + r,
        (tile * (groups // PER_SHARED) + g[None, :] // PER_SHARED) * TILE + r, SCALES,
    )  # fmt: skip
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    group: tl.constexpr = 4 * WORDS * PARTS
    to = o.to(tl.int64)[:, None, None] * (groups * group) + g[None, :, None] * group
    to += tl.arange(0, 4 * WORDS)[None, None, :]
    is_in = is_row[:, None, None] & (own < groups)[None, :, None]
    for part in tl.static_range(PARTS):
        four = bytes_of(w, high, i, t_0, t_1, t_2, t_3, part, FORM)
        even, odd = tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3))
        code = tl.reshape(tl.join(even, odd), [ROWS, GROUPS, 4 * WORDS])
        value = to_float(code - OFFSET) * scale
        if (SCALES == HALVES) or (SCALES == K):
            value -= minimum
        if HAS_INDEX:
            value *= factor
        tl.store(out + to + part * 4 * WORDS, value.to(out.dtype.element_ty), mask=is_in)


def unpack_rows(packed: Packed, out: Tensor, first: int = 0, index: Tensor | None = None, factor: float = 1.0) -> None:
    """out = rows of a matrix from `first` on, or factor · rows at `index`. out: [rows, cols], contiguous, any float."""
    layout, groups = packed.layout, packed.scales.shape[1]
    rows = TILE_ROWS if index is None else 1
    unpack_kernel[(-(-len(out) // rows), -(-groups // GROUPS_AT_ONCE))](
        packed.words, packed.high, packed.scales, packed.shared, packed.high if index is None else index, out, first,
        len(out), float(factor), *layout.packed_table,
        groups=groups, OFFSET=layout.offset, TILE=TILE_ROWS, ROWS=rows, GROUPS=GROUPS_AT_ONCE, WORDS=layout.words,
        PARTS=layout.parts, PER_SHARED=1 if packed.shared.ndim == 1 else groups // packed.shared.shape[1],
        FORM=int(layout.form), SCALES=int(layout.scales), HAS_INDEX=index is not None,
        num_warps=4 if index is None else 1, enable_fp_fusion=False,
    )  # fmt: skip
