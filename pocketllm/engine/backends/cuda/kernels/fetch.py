"""What a thread reads of a packed matrix: words and scales of a tile's sixteen rows, as `layouts` puts them."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import IS_INTERPRETED
from pocketllm.engine.backends.cuda.kernels.words import (
    BYTE,
    NIBBLE_1,
    NIBBLE_2,
    SHARED_VALUES,
    SIGNED,
    TILE,
    K,
    load_four,
    load_two,
    scales_of,
)


@triton.jit
def fetch_rows(w_words, w_high, at, lane, FORM: tl.constexpr):
    """A thread's words of a near and a far row of a tile's block, and what holds their upper bits."""
    planes: tl.constexpr = 2 if FORM == BYTE else 1
    near_at = at * (256 * planes) + lane * 4
    near, far = load_four(w_words, near_at), load_four(w_words, near_at + 128)
    near_2, far_2 = near, far
    if FORM == BYTE:
        near_2, far_2 = load_four(w_words, near_at + 256), load_four(w_words, near_at + 384)
    near_high, far_high = (near[0], near[0]), (far[0], far[0])
    if FORM == NIBBLE_1:
        word, far_word = tl.load(w_high + at * 64 + lane), tl.load(w_high + at * 64 + lane + 32)
        near_high, far_high = (word, word), (far_word, far_word)
    if FORM == NIBBLE_2:
        near_high = load_two(w_high, at * 128 + lane * 2)
        far_high = load_two(w_high, at * 128 + lane * 2 + 64)
    return (near, near_2, near_high), (far, far_2, far_high)


@triton.jit
def fetch_scales(w_scales, w_shared, tile, u, row, units: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """What memory has of the scales of a unit's one or two groups, of rows `row` and `row` + 8 of a tile; not looked at
    yet, so that nothing waits."""
    groups: tl.constexpr = units * 32 // GROUP
    at = (tile * groups + u * (32 // GROUP)) * TILE + row * 2
    first = load_two(w_scales, at)
    last = first
    if GROUP == 16:
        last = load_two(w_scales, at + TILE)
    both = first
    if (SCALES == K) or (SCALES == SIGNED):
        each: tl.constexpr = SHARED_VALUES // 32
        both = load_two(w_shared, (tile * tl.cdiv(units, each) + u // each) * TILE + row * 2)
    return (first[0], last[0], both[0]), (first[1], last[1], both[1])


@triton.jit
def fetch_tile(
    w_words, w_high, w_scales, w_shared, tile, block, lane,
    units: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A thread's part of a tile's 16 rows of a block: words of a near and a far row at its place, scales of its unit.

    Past the last block that one again.
    """
    block = tl.minimum(block, units // 4 - 1)
    near, far = fetch_rows(w_words, w_high, tile * (units // 4) + block, lane, FORM)
    near_scales, far_scales = fetch_scales(
        w_scales, w_shared, tile, block * 4 + lane % 4, lane // 4, units, GROUP, SCALES
    )
    return near, far, near_scales, far_scales


@triton.jit
def prefetch(
    w_words, tile, begin, end, units: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr, FORM: tl.constexpr
):
    """Ask for up to TURNS times 4 KiB of the words of each warp's tile from block `begin` to `end` on, into the
    second-level cache."""
    if not IS_INTERPRETED:
        planes: tl.constexpr = 2 if FORM == BYTE else 1
        line = tl.arange(0, 32 * WARPS) % 32
        last = (end - begin) * (8 * planes) - 1
        for turn in tl.static_range(TURNS):
            at = (tile * (units // 4) + begin) * (256 * planes) + tl.minimum(line + turn * 32, last) * 32
            tl.inline_asm_elementwise(
                "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [w_words + at], dtype=tl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip


@triton.jit
def opened(fetched, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """Scale and minimum of a unit's groups."""
    first, last, both = fetched
    scale, minimum = scales_of(first, both, SCALES)
    second, second_minimum = scale, minimum
    if GROUP == 16:
        second, second_minimum = scales_of(last, both, SCALES)
    return scale, minimum, second, second_minimum
