"""A short causal convolution of each channel by itself, whose last inputs are kept in a sequence's slot.

Sequences of one token read their state and move it on in one program; of others every tile of tokens is a program, and
states are moved on by a launch of their own, when all tiles have read them. Taps are summed first to last, so a token's
bits do not depend on the step it is in. A slot below 0 is nobody's.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def silu_of(x, IS_SILU: tl.constexpr):
    """silu(x), or x."""
    if IS_SILU:
        return x / (1 + tl.exp(-x))
    else:
        return x


@triton.jit
def single_kernel(
    x, taps, states, slots, lengths, seqs, tokens, out, x_stride, channels,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """A sequence's only token, BLOCK channels: its result, and the state moved on by a row.

    taps: [channels, TAPS]; states: [slots, rows, channels] with rows = (TAPS - 1) · DILATION; out: contiguous.
    """
    wait()
    number, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq, token = tl.load(seqs + number), tl.load(tokens + number).to(tl.int64)
    slot = tl.load(slots + seq).to(tl.int64)
    if slot >= 0:
        is_in = c < channels
        is_kept = is_in & (c * 0 + tl.load(lengths + seq) > 1)
        own = states + slot * ROWS * channels + c
        new = tl.load(x + token * x_stride + c, mask=is_in, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for row in tl.static_range(ROWS):  # a thread has the same channels in all rows
            old = tl.load(own + row * channels, mask=is_kept, other=0.0)
            if row % DILATION == 0:
                total += old * tl.load(taps + c * TAPS + row // DILATION, mask=is_in, other=0.0)
            if row > 0:
                tl.store(own + (row - 1) * channels, old, mask=is_in)
        tl.store(own + (ROWS - 1) * channels, new, mask=is_in)
        total += new * tl.load(taps + c * TAPS + TAPS - 1, mask=is_in, other=0.0)
        tl.store(out + token * channels + c, silu_of(total, IS_SILU), mask=is_in)


@triton.jit
def tile_kernel(
    x, taps, states, slots, lengths, starts, tile_seqs, tile_firsts, out, x_stride, channels,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr,
    IS_SILU: tl.constexpr,
):  # fmt: skip
    """TILE tokens of a sequence of several, BLOCK channels; states are only read."""
    wait()
    tile = tl.program_id(0)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    seq = tl.load(tile_seqs + tile)
    start = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - start
    slot = tl.load(slots + seq).to(tl.int64)
    row = tl.load(tile_firsts + tile) + tl.arange(0, TILE)[:, None]
    is_in = (c < channels) & (row < count)
    is_kept = is_in & (row * 0 + tl.load(lengths + seq) > count) & (row * 0 + slot >= 0)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        at = row - (TAPS - 1 - tap) * DILATION
        value = tl.load(x + (start + at).to(tl.int64) * x_stride + c, mask=is_in & (at >= 0), other=0.0)
        if tap < TAPS - 1:
            before = states + (slot * ROWS + ROWS + at) * channels + c
            value += tl.load(before, mask=is_kept & (at < 0), other=0.0)
        total += value * tl.load(taps + c * TAPS + tap, mask=c < channels, other=0.0)
    tl.store(out + (start + row).to(tl.int64) * channels + c, silu_of(total, IS_SILU), mask=is_in)


@triton.jit
def keep_kernel(
    x, states, slots, lengths, starts, tile_seqs, tile_firsts, x_stride, channels,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """States of sequences of several tokens moved on, each by the program of its first tile."""
    wait()
    tile, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq = tl.load(tile_seqs + tile)
    slot = tl.load(slots + seq).to(tl.int64)
    if (tl.load(tile_firsts + tile) == 0) & (slot >= 0):
        start = tl.load(starts + seq)
        count = tl.load(starts + seq + 1) - start
        is_in = c < channels
        is_kept = is_in & (c * 0 + tl.load(lengths + seq) > count)
        own = states + slot * ROWS * channels + c
        for row in tl.static_range(ROWS):  # what is read lies after what has been written
            at = count - ROWS + row
            value = tl.load(x + (start + at).to(tl.int64) * x_stride + c, mask=is_in & (c * 0 + at >= 0), other=0.0)
            value += tl.load(own + (row + count) * channels, mask=is_kept & (c * 0 + at < 0), other=0.0)
            tl.store(own + row * channels, value, mask=is_in)
