"""What groups of tokens are worth to a token, and attention over those that it picks and the tokens after them.

A group's key is made of its tokens' cached ones wherever it is scored: [groups, dim] take no memory beside the cache.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.attention import read_slots, scores_of
from pocketllm.engine.backends.cuda.kernels.heads import read_heads
from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.layers.latent.kernels.selection import matches_of, read_query, seen_by, seq_of


@triton.jit
def group_keys(
    rows, table, weight, angles, group, is_in, eps, num_freq,
    DIM: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Means of groups' cached keys, normed, and rotated at each group's first token: [groups, D_BLOCK] in float32."""
    d = tl.arange(0, D_BLOCK)[None, :]
    is_first, turns = d < num_freq, d < 2 * num_freq
    partner, f = tl.where(is_first, d + num_freq, d - num_freq), tl.where(is_first, d, d - num_freq)
    own = tl.zeros([group.shape[0], D_BLOCK], tl.float32)
    other = tl.zeros([group.shape[0], D_BLOCK], tl.float32)
    for token in tl.static_range(RATIO):
        position = group * RATIO + token
        block = tl.load(table + position // BLOCK, mask=is_in, other=0).to(tl.int64)
        at = rows + (block * BLOCK + position % BLOCK)[:, None] * DIM
        own += tl.load(at + d, mask=is_in[:, None] & (d < DIM), other=0.0).to(tl.float32)
        other += tl.load(at + partner, mask=is_in[:, None] & turns, other=0.0).to(tl.float32)
    own, other = own / RATIO, other / RATIO
    factor = 1 / tl.sqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
    own = own * factor * tl.load(weight + d, mask=d < DIM, other=0.0)
    other = other * factor * tl.load(weight + partner, mask=turns, other=0.0)
    turn = angles + group[:, None] * 2 * num_freq + f
    cos = tl.load(turn, mask=is_in[:, None] & turns, other=0.0)
    sin = tl.load(turn + num_freq, mask=is_in[:, None] & turns, other=0.0)
    return tl.where(turns, own * cos + tl.where(is_first, -other, other) * sin, own)


@triton.jit(do_not_specialize=("first", "seqs", "table_stride", "scores_stride"))
def worth_kernel(
    q, rows, weight, angles, table, starts, lengths, positions, scores, first, seqs, q_stride, table_stride,
    scores_stride, eps, num_freq,
    HEADS: tl.constexpr, H_BLOCK: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """scores[t, g] = Σ over heads of max(q · key, 0) for TILE whole groups up to a token, in float32."""
    wait()
    row, tile = tl.program_id(0), tl.program_id(1)
    token = first + row
    seq = seq_of(starts, token, seqs, SEQS)
    seen = seen_by(positions, lengths, token, seq, RATIO)
    if tile * TILE < seen:
        group = tile * TILE + tl.arange(0, TILE)
        own_table = table + seq.to(tl.int64) * table_stride
        keys = group_keys(
            rows, own_table, weight, angles, group, group < seen, eps, num_freq, DIM, D_BLOCK, BLOCK, RATIO
        )
        matches = matches_of(read_query(q, token, q_stride, HEADS, H_BLOCK, DIM, D_BLOCK), keys)
        tl.store(scores + row.to(tl.int64) * scores_stride + group, tl.sum(matches, 0), mask=group < seen)


@triton.jit(do_not_specialize=("seqs", "table_stride", "groups_stride"))
def attention_kernel(
    q, weight, angles, keys, values, table, starts, lengths, positions, groups, counts, out, seqs, q_stride,
    table_stride, groups_stride, kv_heads, eps, num_freq, scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
    HAS_NORM: tl.constexpr, ROTATION: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One token, the GROUP query heads of one key head: over its groups, then over what follows the last whole one."""
    wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = seq_of(starts, token, seqs, SEQS)
    length = tl.minimum(tl.load(positions + token) + 1, tl.load(lengths + seq))
    in_groups = tl.load(counts + token) * RATIO
    rest = length // RATIO * RATIO
    g = tl.arange(0, ROWS)[:, None]
    own = read_heads(
        q, token * q_stride + (head * GROUP + g) * DIM, token + g * 0, g < GROUP, weight, eps, angles, num_freq,
        DIM, D_BLOCK, HAS_NORM, ROTATION,
    ).to(keys.dtype.element_ty)  # fmt: skip
    own_table = table + seq.to(tl.int64) * table_stride
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_BLOCK], tl.float32)
    for first in range(0, in_groups + length - rest, TILE):
        at = first + tl.arange(0, TILE)
        is_in = at < in_groups + length - rest
        group = tl.load(groups + token * groups_stride + at // RATIO, mask=at < in_groups, other=0)
        position = tl.where(at < in_groups, group * RATIO + at % RATIO, rest + at - in_groups)
        block = tl.load(own_table + position // BLOCK, mask=is_in, other=0)
        some = read_slots(keys, block, position, is_in, head, kv_heads, BLOCK, DIM, D_BLOCK)
        scores = scores_of(own, some, scale, softcap, is_in[None, :], HAS_SOFTCAP)
        new = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - new[:, None]), tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        some = read_slots(values, block, position, is_in, head, kv_heads, BLOCK, V_DIM, V_BLOCK)
        acc = tl.dot(weights.to(some.dtype), some, acc * shrink[:, None])
        largest = new
    e = tl.arange(0, V_BLOCK)[None, :]
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    to = ((token * kv_heads + head) * GROUP + g) * V_DIM + e
    tl.store(out + to, acc, mask=(g < GROUP) & (e < V_DIM))
