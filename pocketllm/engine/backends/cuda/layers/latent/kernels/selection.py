"""Which cached keys each token attends: their scores, and of each token the best of them, in the order of the sequence.

Scores are in memory, of some tokens at a time. The best are found by their bits, eight at a time from the top
(radix selection, Alabi et al. 2012), so that equal scores are told apart by their place alone.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait

NUMBERS, ENTRIES, TOKENS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What `pick_kernel` gives."""


@triton.jit
def seq_of(starts, token, seqs, SEQS: tl.constexpr):
    """The sequence of a token; of one behind the last, the last sequence."""
    s = tl.arange(0, SEQS)
    ends = tl.load(starts + 1 + s, mask=s < seqs, other=2147483647)
    return tl.minimum(tl.sum((ends <= token).to(tl.int32), 0), seqs - 1)


@triton.jit
def seen_by(positions, lengths, token, seq, RATIO: tl.constexpr):
    """Entries of whole groups of RATIO tokens up to a token; none of a token that is nobody's."""
    return tl.minimum(tl.load(positions + token) + 1, tl.load(lengths + seq)) // RATIO


@triton.jit
def read_query(
    q, token, q_stride, HEADS: tl.constexpr, H_BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr
):
    """An index's heads of a token: [H_BLOCK, D_BLOCK]."""
    h, d = tl.arange(0, H_BLOCK)[:, None], tl.arange(0, D_BLOCK)[None, :]
    return tl.load(q + token.to(tl.int64) * q_stride + h * DIM + d, mask=(h < HEADS) & (d < DIM), other=0.0)


@triton.jit
def matches_of(own, keys):
    """max(q · key, 0) of every head and key, as exact as float32: another key is no rounding error."""
    return tl.maximum(tl.dot(own, tl.trans(keys.to(tl.float32)), input_precision="tf32x3"), 0.0)


@triton.jit
def entry_slots(table, entry, is_in, BLOCK: tl.constexpr, RATIO: tl.constexpr):
    """Where entries lie in a cache that has one for every RATIO tokens, in the block where they end."""
    end = (entry + 1) * RATIO - 1
    blocks = tl.load(table + end // BLOCK, mask=is_in, other=0)
    return blocks * ((BLOCK + RATIO - 1) // RATIO) + end % BLOCK // RATIO


@triton.jit(do_not_specialize=("first", "seqs", "table_stride", "scores_stride"))
def scores_kernel(
    q, weights, rows, table, starts, lengths, positions, scores, first, seqs, q_stride, weights_stride, table_stride,
    scores_stride,
    HEADS: tl.constexpr, H_BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """scores[t, e] = Σ over heads of weight · max(q · key, 0) for TILE entries that a token sees, in float32."""
    wait()
    row, tile = tl.program_id(0), tl.program_id(1)
    token = first + row
    seq = seq_of(starts, token, seqs, SEQS)
    seen = seen_by(positions, lengths, token, seq, RATIO)
    if tile * TILE < seen:
        h, d = tl.arange(0, H_BLOCK), tl.arange(0, D_BLOCK)[None, :]
        entry = tile * TILE + tl.arange(0, TILE)
        slot = entry_slots(table + seq.to(tl.int64) * table_stride, entry, entry < seen, BLOCK, RATIO)
        keys = tl.load(rows + slot.to(tl.int64)[:, None] * DIM + d, mask=(entry < seen)[:, None] & (d < DIM), other=0.0)
        matches = matches_of(read_query(q, token, q_stride, HEADS, H_BLOCK, DIM, D_BLOCK), keys)
        share = tl.load(weights + token.to(tl.int64) * weights_stride + h, mask=h < HEADS, other=0.0)
        worth = tl.sum(matches * share[:, None], 0)
        tl.store(scores + row.to(tl.int64) * scores_stride + entry, worth, mask=entry < seen)


@triton.jit
def ordered(score):
    """Bits of scores as unsigned integers in the scores' order. Zeros of a token's scores are of one sign."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -2147483648)


@triton.jit
def least_taken(own, seen, count, CHUNK: tl.constexpr):
    """The bits of the last of the `count` best scores, and how many of equal ones are among them."""
    top, left = tl.full([], 0, tl.int32), count
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros([512], tl.int32)  # the second half takes what does not count
        for begin in range(0, seen, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            bits = ordered(tl.load(own + at, mask=at < seen, other=0.0))
            counted = at < seen
            if turn > 0:
                counted = counted & (((bits ^ top) >> (shift + 8)) == 0)
            counts += tl.histogram(tl.where(counted, (bits >> shift) & 255, 511), 512)
        digit = tl.arange(0, 512)
        counts = tl.where(digit < 256, counts, 0)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        best = tl.sum(((above >= left) & (digit < 256)).to(tl.int32), 0)
        left -= tl.sum(tl.where(digit == best, above, 0), 0)
        top = top | (best << shift)
    return top, left


@triton.jit
def taken_of(own, begin, seen, top, left, equal, TOP: tl.constexpr, CHUNK: tl.constexpr):
    """CHUNK entries from `begin` on, whether they are among the TOP best, and how many of those until here are as good
    as the last of them, which `top` and `left` tell."""
    entry = begin + tl.arange(0, CHUNK)
    is_taken = entry < seen
    if seen > TOP:
        bits = ordered(tl.load(own + entry, mask=entry < seen, other=0.0))
        is_equal = is_taken & (bits == top)
        place = equal + tl.cumsum(is_equal.to(tl.int32), 0)
        # what is unsigned there is compared with its upper bit turned
        is_better = (bits ^ -2147483648) > (top ^ -2147483648)
        is_taken = is_taken & (is_better | (is_equal & (place <= left)))
        equal += tl.sum(is_equal.to(tl.int32), 0)
    return entry, is_taken, equal


@triton.jit(do_not_specialize=("first", "seqs", "table_stride", "scores_stride", "picked_stride"))
def pick_kernel(
    scores, table, starts, lengths, positions, picked, counts, first, seqs, table_stride, scores_stride, picked_stride,
    TOP: tl.constexpr, GIVES: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, R_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """A token's TOP best entries, or all, in the order of the sequence and of equal ones the earlier, and how many.

    GIVES: their NUMBERS; slots of ENTRIES; or slots of their groups' TOKENS, and of those after the last whole group.
    """
    wait()
    row = tl.program_id(0)
    token = first + row
    seq = seq_of(starts, token, seqs, SEQS)
    seen, length = seen_by(positions, lengths, token, seq, RATIO), seen_by(positions, lengths, token, seq, 1)
    own, own_table = scores + row.to(tl.int64) * scores_stride, table + seq.to(tl.int64) * table_stride
    to = picked + token.to(tl.int64) * picked_stride
    top, left = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if seen > TOP:
        top, left = least_taken(own, seen, TOP, CHUNK)
    taken, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, seen, CHUNK):
        entry, is_taken, equal = taken_of(own, begin, seen, top, left, equal, TOP, CHUNK)
        place = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        if GIVES == NUMBERS:
            tl.store(to + place, entry, mask=is_taken)
        if GIVES == ENTRIES:
            tl.store(to + place, entry_slots(own_table, entry, is_taken, BLOCK, RATIO), mask=is_taken)
        if GIVES == TOKENS:
            for member in tl.static_range(RATIO):
                slot = entry_slots(own_table, entry * RATIO + member, is_taken, BLOCK, 1)
                tl.store(to + place * RATIO + member, slot, mask=is_taken)
        taken += tl.sum(is_taken.to(tl.int32), 0)
    if GIVES == TOKENS:
        rest = seen * RATIO + tl.arange(0, R_BLOCK)
        slot = entry_slots(own_table, rest, rest < length, BLOCK, 1)
        tl.store(to + taken * RATIO + rest - seen * RATIO, slot, mask=rest < length)
        taken = taken * RATIO + length - seen * RATIO
    tl.store(counts + token, taken)
