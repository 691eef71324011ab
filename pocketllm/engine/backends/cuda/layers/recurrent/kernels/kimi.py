"""The delta rule of Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): every value of a key has its own decay.

As in `delta`, but G is a vector of each token, and what two tokens are to each other is a sum over the values of keys:

    (I + strictly lower(b_i Σ k_id k_jd e^(G_id - G_jd))) U = b (V - (e^G K) S)
    O = (e^G Q) S + lower(Σ q_id k_jd e^(G_id - G_jd)) U
    S ← e^(G_n) S + (e^(G_n - G) K)ᵀ U

These sums are a product of two matrices with exponents above 0 alone, the larger the longer a chunk is. So a chunk has
SIDE tokens, whose sums are made value by value: `chunks_kernel` does it for all chunks at once, and leaves decayed rows
for `states_kernel`, which goes through a sequence's chunks by products alone.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.layers.recurrent.kernels.delta import (
    inverted_blocks,
    moved_on,
    read_unit,
    sigmoid,
    softplus,
)


@triton.jit
def decay_logarithms(step, rate, time_bias, bound, HAS_BOUND: tl.constexpr):
    """Of each value of a key, at most 0, and with a bound above it."""
    if HAS_BOUND:
        return bound / (1 + tl.exp(rate * (step + time_bias)))
    else:
        return rate * softplus(step + time_bias)


@triton.jit
def single_kernel(
    q, k, v, step, share, rate, time_bias, states, slots, lengths, seqs, tokens, out,
    step_stride, share_stride, heads, bound, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """A sequence's only token, V_BLOCK values of a head: columns of its state, read and written once.

    q, k, v: contiguous [tokens, heads · DIM]; states: [slots, heads, DIM, DIM].
    """
    wait()
    number, head = tl.program_id(0), tl.program_id(1)
    seq, token = tl.load(seqs + number), tl.load(tokens + number).to(tl.int64)
    slot = tl.load(slots + seq).to(tl.int64)
    if slot >= 0:
        d, e = tl.arange(0, BLOCK), tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
        at = ((slot * heads + head) * DIM + d[:, None]) * DIM + e[None, :]
        is_in = (d < DIM)[:, None] & (e < DIM)[None, :]
        state = tl.load(states + at, mask=is_in & (at * 0 + tl.load(lengths + seq) > 1), other=0.0)
        row = (token * heads + head) * DIM
        own_q = tl.load(q + row + d, mask=d < DIM, other=0.0)
        own_k = tl.load(k + row + d, mask=d < DIM, other=0.0)
        own_v = tl.load(v + row + e, mask=e < DIM, other=0.0)
        own_q = own_q / tl.sqrt(tl.sum(own_q * own_q, 0) + eps) / tl.sqrt(float(DIM))
        own_k = own_k / tl.sqrt(tl.sum(own_k * own_k, 0) + eps)
        time = tl.load(step + token * step_stride + head * DIM + d, mask=d < DIM, other=0.0)
        bias = tl.load(time_bias + head * DIM + d, mask=d < DIM, other=0.0)
        decay = tl.exp(decay_logarithms(time, tl.load(rate + head), bias, bound, HAS_BOUND))
        state = moved_on(state * decay[:, None], own_k, own_v, tl.load(share + token * share_stride + head))
        tl.store(states + at, state, mask=is_in)
        tl.store(out + row + e, tl.sum(state * own_q[:, None], 0), mask=e < DIM)


@triton.jit
def chunks_kernel(
    q, k, step, share, rate, time_bias, starts, tile_seqs, tile_firsts, solved, scores, q_decayed, k_decayed, k_rest,
    kept, step_stride, share_stride, heads, bound, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: what `states_kernel` multiplies.

    solved: (I + …)⁻¹ b, and scores: lower(Σ …), both [chunks, heads, SIDE, SIDE]; q_decayed, k_decayed: e^G times rows
    of length one, and k_rest: e^(G_n - G) times them, all [tokens, heads · DIM]; kept: e^(G_n), [chunks, heads, DIM].
    """
    wait()
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile = chunk // (TILE // SIDE)
    seq, first = tl.load(tile_seqs + tile), tl.load(tile_firsts + tile) + chunk % (TILE // SIDE) * SIDE
    start, stop = tl.load(starts + seq), tl.load(starts + seq + 1)
    if start + first < stop:
        r, d = tl.arange(0, SIDE), tl.arange(0, BLOCK)[None, :]
        token = start + first + r
        is_row = token < stop
        row = (token.to(tl.int64) * heads + head)[:, None] * DIM
        own_q = read_unit(q + row, is_row[:, None], eps, DIM, BLOCK) / tl.sqrt(float(DIM))
        own_k = read_unit(k + row, is_row[:, None], eps, DIM, BLOCK)
        is_in = is_row[:, None] & (d < DIM)
        time = tl.load(step + token.to(tl.int64)[:, None] * step_stride + head * DIM + d, mask=is_in, other=0.0)
        bias = tl.load(time_bias + head * DIM + d, mask=d < DIM, other=0.0)
        decays = tl.where(is_in, decay_logarithms(time, tl.load(rate + head), bias, bound, HAS_BOUND), 0.0)
        sums, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
        tl.store(q_decayed + row + d, own_q * tl.exp(sums), mask=is_in)
        tl.store(k_decayed + row + d, own_k * tl.exp(sums), mask=is_in)
        tl.store(k_rest + row + d, own_k * tl.exp(tl.minimum(total[None, :] - sums, 0.0)), mask=is_in)
        place = chunk * heads + head
        tl.store(kept + place * DIM + d, tl.exp(total)[None, :], mask=d < DIM)
        weight = sigmoid(tl.load(share + token.to(tl.int64) * share_stride + head, mask=is_row, other=0.0))
        weight = tl.where(is_row, weight, 0.0)
        lower, seen = among(own_q, own_k, sums, weight, SIDE)
        at = place * SIDE * SIDE + r[:, None] * SIDE + r[None, :]
        tl.store(solved + at, inverted_blocks(lower, SIDE, SIDE) * weight[None, :])
        tl.store(scores + at, seen)


@triton.jit
def among(q, k, sums, weight, SIDE: tl.constexpr):
    """What the tokens of a chunk are to each other, [SIDE, SIDE]: strictly lower(b_i Σ …) transposed, and lower(Σ …).

    q, k: [SIDE, values], of length one; sums: G.
    """
    r, c = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    lower, seen = tl.zeros([SIDE, SIDE], tl.float32), tl.zeros([SIDE, SIDE], tl.float32)
    for token in range(SIDE):
        own = tl.sum(tl.where(r == token, k, 0.0), 0)
        until = tl.sum(tl.where(r == token, sums, 0.0), 0)
        # exponents above 0 are of places that are not kept
        later = own[None, :] * tl.exp(tl.minimum(sums - until[None, :], 0.0))
        alike, found = tl.sum(k * later, 1) * weight, tl.sum(q * later, 1)
        lower = tl.where((r == token) & (c > token), alike[None, :], lower)
        seen = tl.where((c == token) & (r >= token), found[:, None], seen)
    return lower, seen


@triton.jit
def states_kernel(
    q_decayed, k_decayed, k_rest, v, kept, solved, scores, states, slots, lengths, starts, tile_seqs, tile_firsts, out,
    heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of a sequence, V_BLOCK values of a head, by the program of its first tile; see `chunks_kernel`."""
    wait()
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = tl.load(tile_seqs + tile)
    slot = tl.load(slots + seq).to(tl.int64)
    if (tl.load(tile_firsts + tile) == 0) & (slot >= 0):
        start, stop = tl.load(starts + seq), tl.load(starts + seq + 1)
        r, d = tl.arange(0, SIDE), tl.arange(0, BLOCK)
        e = (tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK))[None, :]
        own = states + ((slot * heads + head) * DIM + d[:, None]) * DIM + e
        is_in = (d < DIM)[:, None] & (e < DIM)
        state = tl.load(own, mask=is_in & (d[:, None] * 0 + tl.load(lengths + seq) > stop - start), other=0.0)
        for chunk in range(tl.cdiv(stop - start, SIDE)):
            token = start + chunk * SIDE + r
            row = (token.to(tl.int64) * heads + head)[:, None] * DIM
            is_row = (token < stop)[:, None]
            is_key, is_value = is_row & (d < DIM)[None, :], is_row & (e < DIM)
            k = tl.load(k_decayed + row + d[None, :], mask=is_key, other=0.0)
            q = tl.load(q_decayed + row + d[None, :], mask=is_key, other=0.0)
            rest = tl.load(k_rest + row + d[None, :], mask=is_key, other=0.0)
            known = tl.load(v + row + e, mask=is_value, other=0.0)
            place = (tile * (TILE // SIDE) + chunk) * heads + head
            at = place * SIDE * SIDE + r[:, None] * SIDE + r[None, :]
            known -= tl.dot(k, state, input_precision=PRECISION)
            added = tl.dot(tl.load(solved + at), known, input_precision=PRECISION)
            seen = tl.dot(q, state, input_precision=PRECISION)
            seen += tl.dot(tl.load(scores + at), added, input_precision=PRECISION)
            tl.store(out + row + e, seen, mask=is_value)
            share = tl.load(kept + place * DIM + d, mask=d < DIM, other=0.0)
            state = share[:, None] * state + tl.dot(tl.trans(rest), added, input_precision=PRECISION)
        tl.store(own, state, mask=is_in)
