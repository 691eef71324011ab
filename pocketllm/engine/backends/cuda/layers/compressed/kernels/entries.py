"""Entries of groups of tokens, and what a sequence keeps of its latest tokens.

Kept rows are a ring: that of position p lies at p mod ROWS, so that a token moves one row and no other. Which of them
are a sequence's own its length alone tells; a slot below 0 is nobody's.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.layers.latent.kernels.selection import entry_slots, seq_of


@triton.jit
def copy_row(source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH values."""
    c = tl.arange(0, BLOCK)
    tl.store(target + c, tl.load(source + c, mask=c < WIDTH), mask=c < WIDTH)


@triton.jit(do_not_specialize=("seqs",))
def keep_kernel(
    first, second, kept, slots, starts, lengths, positions, seqs, first_stride, second_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SECOND: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """A token's row, `first` (beside `second`), kept if it is among its sequence's last.

    first, second: [tokens, WIDTH] each; kept: [slots, ROWS, all values of a row].
    """
    wait()
    token = tl.program_id(0).to(tl.int64)
    seq = seq_of(starts, token, seqs, SEQS)
    slot, position = tl.load(slots + seq).to(tl.int64), tl.load(positions + token)
    if (slot >= 0) & (position >= tl.load(lengths + seq) - ROWS):
        place = slot * ROWS + position % ROWS
        if HAS_SECOND:
            copy_row(first + token * first_stride, kept + place * (2 * WIDTH), WIDTH, BLOCK)
            copy_row(second + token * second_stride, kept + place * (2 * WIDTH) + WIDTH, WIDTH, BLOCK)
        else:
            copy_row(first + token * first_stride, kept + place * WIDTH, WIDTH, BLOCK)


@triton.jit
def turned(value, inv_freq, position, num_freq, DIM: tl.constexpr, D_BLOCK: tl.constexpr):
    """The last of DIM values rotated as neighbors at a position, the angle in float64 before it is rounded."""
    pair = tl.arange(0, D_BLOCK // 2)
    f = pair - (DIM // 2 - num_freq)
    turns = (f >= 0) & (f < num_freq)
    freq = tl.load(inv_freq + f, mask=turns, other=0.0)
    angle = position.to(tl.float64) * freq.to(tl.float64)
    cos, sin = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
    even, odd = tl.split(tl.reshape(value, [D_BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [D_BLOCK])


@triton.jit
def mixed_group(
    values, gates, kept, place, token, position, start, values_stride, gates_stride,
    RATIO: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Σ softmax(gate + place) · value over the MEMBERS tokens up to a token, for each of DIM values: [D_BLOCK].

    Tokens before position `start` are kept ones of the sequence. With more members than RATIO those of the group before
    have values and gates of their own, ahead of those for a token's own group.
    """
    overlaps: tl.constexpr = MEMBERS > RATIO
    width: tl.constexpr = 2 * DIM if overlaps else DIM
    d = tl.arange(0, D_BLOCK)[None, :]
    largest = tl.full([D_BLOCK], -1e30, tl.float32)
    total, mixed = tl.zeros([D_BLOCK], tl.float32), tl.zeros([D_BLOCK], tl.float32)
    for first in range(0, MEMBERS, AT_ONCE):
        member = first + tl.arange(0, AT_ONCE)[:, None]
        at = position + 1 - MEMBERS + member
        is_in = (member < MEMBERS) & (at >= 0) & (d < DIM)
        column = d
        if overlaps:
            column = d + tl.where(member < RATIO, 0, DIM)
        row = (token + at - position).to(tl.int64)
        old = kept + at % (MEMBERS - 1) * (2 * width) + column
        value = tl.load(tl.where(at >= start, values + row * values_stride + column, old), mask=is_in, other=0.0)
        gate = tl.load(tl.where(at >= start, gates + row * gates_stride + column, old + width), mask=is_in, other=0.0)
        gate += tl.load(place + member % RATIO * width + column, mask=is_in, other=0.0)
        gate = tl.where(is_in, gate, float("-inf"))
        new = tl.maximum(largest, tl.max(gate, 0))
        weights, shrink = tl.exp(gate - new[None, :]), tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights * value, 0)
        largest = new
    return mixed / tl.maximum(total, 1e-30)


@triton.jit(do_not_specialize=("seqs", "table_stride"))
def entries_kernel(
    values, gates, kept, place, weight, inv_freq, out, slots, table, starts, lengths, positions, seqs, values_stride,
    gates_stride, table_stride, eps, num_freq,
    RATIO: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, SEQS: tl.constexpr, HAS_NORM: tl.constexpr, ROTATES: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """The entry of the group that ends with a token, if one does; KEEPS: of steps of single tokens, whose rows are kept
    by the same program."""
    wait()
    token = tl.program_id(0).to(tl.int64)
    seq = seq_of(starts, token, seqs, SEQS)
    slot, position = tl.load(slots + seq).to(tl.int64), tl.load(positions + token)
    width: tl.constexpr = 2 * DIM if MEMBERS > RATIO else DIM
    own = kept + slot * ((MEMBERS - 1) * 2 * width)
    if (slot >= 0) & ((position + 1) % RATIO == 0):
        start = tl.load(lengths + seq) - (tl.load(starts + seq + 1) - tl.load(starts + seq))
        value = mixed_group(
            values, gates, own, place, token, position, start, values_stride, gates_stride,
            RATIO, MEMBERS, DIM, D_BLOCK, AT_ONCE,
        )  # fmt: skip
        d, entry = tl.arange(0, D_BLOCK), position // RATIO
        if HAS_NORM:
            factor = 1 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
            value = value * factor * tl.load(weight + d, mask=d < DIM, other=0.0)
        if ROTATES:
            value = turned(value, inv_freq, entry * RATIO, num_freq, DIM, D_BLOCK)
        to = entry_slots(table + seq.to(tl.int64) * table_stride, entry, entry >= 0, BLOCK, RATIO).to(tl.int64) * DIM
        tl.store(out + to + d, value.to(out.dtype.element_ty), mask=d < DIM)
    if KEEPS:
        tl.debug_barrier()  # the row that is replaced is the group's first
        if slot >= 0:
            to = own + position % (MEMBERS - 1) * (2 * width)
            block: tl.constexpr = 2 * D_BLOCK if MEMBERS > RATIO else D_BLOCK
            copy_row(values + token * values_stride, to, width, block)
            copy_row(gates + token * gates_stride, to + width, width, block)
