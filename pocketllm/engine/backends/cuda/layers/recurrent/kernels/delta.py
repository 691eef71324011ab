"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a token at a time, or a chunk of tokens at once.

A chunk's form is that of the paper's appendix, with G the sums of the decays' logarithms up to each token, b the
shares and S the state before it:

    (I + strictly lower(b_i (k_i · k_j) e^(G_i - G_j))) U = b (V - e^G (K S))
    O = e^G (Q S) + lower((q_i · k_j) e^(G_i - G_j)) U
    S ← e^(G_n) S + Kᵀ (e^(G_n - G) U)

No exponent is above 0. `chunks_kernel` makes the two matrices of all chunks at once, the first one inverted, and
`states_kernel` goes through a sequence's chunks with part of a head's state in registers.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def key_head_of(head, key_heads, value_heads, IS_TILED: tl.constexpr):
    """Whose queries and keys a value head reads."""
    if IS_TILED:
        return head % key_heads
    else:
        return head // (value_heads // key_heads)


@triton.jit
def softplus(x):
    """ln(1 + eˣ); x itself where float32 knows no difference."""
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20))))


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ)"""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def moved_on(state, k, v, share):
    """A state that has decayed after one token. state: [key, value]; k: of length one; share: a logit."""
    error = (v - tl.sum(state * k[:, None], 0)) * sigmoid(share)
    return state + k[:, None] * error[None, :]


@triton.jit
def single_kernel(
    mixed, step, share, rate, time_bias, states, slots, lengths, seqs, tokens, out,
    step_stride, share_stride, key_heads, value_heads, eps,
    KEY: tl.constexpr, K_BLOCK: tl.constexpr, VALUE: tl.constexpr, V_BLOCK: tl.constexpr, IS_TILED: tl.constexpr,
):  # fmt: skip
    """A sequence's only token, V_BLOCK values of a head: columns of its state, read and written once.

    mixed: contiguous [tokens, queries | keys | values]; states: [slots, heads, KEY, VALUE].
    """
    wait()
    number, head = tl.program_id(0), tl.program_id(1)
    seq, token = tl.load(seqs + number), tl.load(tokens + number).to(tl.int64)
    slot = tl.load(slots + seq).to(tl.int64)
    if slot >= 0:
        keys, own = key_heads * KEY, key_head_of(head, key_heads, value_heads, IS_TILED)
        d, e = tl.arange(0, K_BLOCK), tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
        at = ((slot * value_heads + head) * KEY + d[:, None]) * VALUE + e[None, :]
        is_in = (d < KEY)[:, None] & (e < VALUE)[None, :]
        state = tl.load(states + at, mask=is_in & (at * 0 + tl.load(lengths + seq) > 1), other=0.0)
        row = mixed + token * (2 * keys + value_heads * VALUE)
        q = tl.load(row + own * KEY + d, mask=d < KEY, other=0.0)
        k = tl.load(row + keys + own * KEY + d, mask=d < KEY, other=0.0)
        v = tl.load(row + 2 * keys + head * VALUE + e, mask=e < VALUE, other=0.0)
        q = q / tl.sqrt(tl.sum(q * q, 0) + eps) / tl.sqrt(float(KEY))
        k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
        time = tl.load(step + token * step_stride + head) + tl.load(time_bias + head)
        state = state * tl.exp(tl.load(rate + head) * softplus(time))
        state = moved_on(state, k, v, tl.load(share + token * share_stride + head))
        tl.store(states + at, state, mask=is_in)
        tl.store(out + (token * value_heads + head) * VALUE + e, tl.sum(state * q[:, None], 0), mask=e < VALUE)


@triton.jit
def read_unit(row, is_row, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Queries or keys of a head brought to length one, [rows, BLOCK]; zeros where is_row is false.

    row: where each begins, [rows, 1].
    """
    d = tl.arange(0, BLOCK)[None, :]
    x = tl.load(row + d, mask=is_row & (d < DIM), other=0.0)
    return x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def decays_of(step, rate, time_bias, head, is_row, step_stride, token):
    """Sums of the decays' logarithms up to each token, [rows]; where is_row is false, as before."""
    time = tl.load(step + token * step_stride + head, mask=is_row, other=0.0) + tl.load(time_bias + head)
    return tl.cumsum(tl.where(is_row, tl.load(rate + head) * softplus(time), 0.0), 0)


@triton.jit
def inverted_blocks(lower, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """(I + lower)⁻¹ of each diagonal block of SIDE rows, [ROWS, ROWS], given lower transposed; it is strictly lower.

    By forward substitution, all blocks at once.
    """
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    is_own = r // SIDE == c // SIDE
    result = tl.where(r == c, 1.0, 0.0)
    for row in range(1, SIDE):
        factors = tl.sum(tl.where(is_own & (c % SIDE == row), lower, 0.0), 1)
        known = tl.sum(factors[:, None] * result, 0)
        result = tl.where(is_own & (r % SIDE == row), result - known[None, :], result)
    return result


@triton.jit
def inverted(lower, ROWS: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)⁻¹, [ROWS, ROWS], given lower transposed; it is strictly lower, and ROWS are 4 · SIDE.

    With D the inverted diagonal blocks and M = D · (lower without them), M⁴ = 0 and the whole is (I - M)(I + M²) D.
    Powers of lower itself would cancel.
    """
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    result = inverted_blocks(lower, ROWS, SIDE)
    rest = tl.dot(result, tl.trans(tl.where(r // SIDE == c // SIDE, 0.0, lower)), input_precision=PRECISION)
    square = tl.dot(rest, rest, input_precision=PRECISION)
    result += tl.dot(square, result, input_precision=PRECISION)
    return result - tl.dot(rest, result, input_precision=PRECISION)


@triton.jit
def chunks_kernel(
    mixed, step, share, rate, time_bias, starts, tile_seqs, tile_firsts, solved, scores,
    step_stride, share_stride, key_heads, value_heads, eps,
    KEY: tl.constexpr, K_BLOCK: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr, IS_TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: (I + …)⁻¹ b, and lower((q · k) e^(G_i - G_j)), both [tiles, heads, TILE, TILE]."""
    wait()
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq, first = tl.load(tile_seqs + tile), tl.load(tile_firsts + tile)
    start, stop = tl.load(starts + seq), tl.load(starts + seq + 1)
    if start + first < stop:
        r, c = tl.arange(0, TILE), tl.arange(0, TILE)
        token = (start + first + r).to(tl.int64)
        is_row = token < stop
        keys, own = key_heads * KEY, key_head_of(head, key_heads, value_heads, IS_TILED)
        row = mixed + token[:, None] * (2 * keys + value_heads * VALUE) + own * KEY
        k = read_unit(row + keys, is_row[:, None], eps, KEY, K_BLOCK)
        sums = decays_of(step, rate, time_bias, head, is_row, step_stride, token)
        weight = sigmoid(tl.load(share + token * share_stride + head, mask=is_row, other=0.0))
        weight = tl.where(is_row, weight, 0.0)
        # exponents above 0 are of places that are not kept
        later = tl.exp(tl.minimum(sums[None, :] - sums[:, None], 0.0))
        alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        lower = tl.where(r[:, None] < c[None, :], alike * later * weight[None, :], 0.0)  # transposed
        at = (tile * value_heads + head) * TILE * TILE + r[:, None] * TILE + c[None, :]
        tl.store(solved + at, inverted(lower, TILE, TILE // 4, PRECISION) * weight[None, :])
        q = read_unit(row, is_row[:, None], eps, KEY, K_BLOCK) / tl.sqrt(float(KEY))
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        since = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        tl.store(scores + at, tl.where(r[:, None] >= c[None, :], seen * since, 0.0))


@triton.jit
def states_kernel(
    mixed, step, rate, time_bias, states, slots, lengths, starts, tile_seqs, tile_firsts, solved, scores, out,
    step_stride, key_heads, value_heads, eps,
    KEY: tl.constexpr, K_BLOCK: tl.constexpr, VALUE: tl.constexpr, V_BLOCK: tl.constexpr, TILE: tl.constexpr,
    IS_TILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of a sequence, V_BLOCK values of a head, by the program of its first tile."""
    wait()
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = tl.load(tile_seqs + tile)
    slot = tl.load(slots + seq).to(tl.int64)
    if (tl.load(tile_firsts + tile) == 0) & (slot >= 0):
        start, stop = tl.load(starts + seq), tl.load(starts + seq + 1)
        keys, own = key_heads * KEY, key_head_of(head, key_heads, value_heads, IS_TILED)
        r, c, d = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, K_BLOCK)
        e = (tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK))[None, :]
        kept = states + ((slot * value_heads + head) * KEY + d[:, None]) * VALUE + e
        is_in = (d < KEY)[:, None] & (e < VALUE)
        state = tl.load(kept, mask=is_in & (d[:, None] * 0 + tl.load(lengths + seq) > stop - start), other=0.0)
        for chunk in range(tl.cdiv(stop - start, TILE)):
            token = (start + chunk * TILE + r).to(tl.int64)
            is_row = token < stop
            row = mixed + token[:, None] * (2 * keys + value_heads * VALUE)
            k = read_unit(row + keys + own * KEY, is_row[:, None], eps, KEY, K_BLOCK)
            v = tl.load(row + 2 * keys + head * VALUE + e, mask=is_row[:, None] & (e < VALUE), other=0.0)
            sums = decays_of(step, rate, time_bias, head, is_row, step_stride, token)
            last = tl.min(sums, 0)
            at = ((tile + chunk) * value_heads + head) * TILE * TILE + r[:, None] * TILE + c[None, :]
            known = v - tl.exp(sums)[:, None] * tl.dot(k, state, input_precision=PRECISION)
            added = tl.dot(tl.load(solved + at), known, input_precision=PRECISION)
            q = read_unit(row + own * KEY, is_row[:, None], eps, KEY, K_BLOCK) / tl.sqrt(float(KEY))
            seen = tl.exp(sums)[:, None] * tl.dot(q, state, input_precision=PRECISION)
            seen += tl.dot(tl.load(scores + at), added, input_precision=PRECISION)
            tl.store(out + (token[:, None] * value_heads + head) * VALUE + e, seen, mask=is_row[:, None] & (e < VALUE))
            added = tl.exp(last - sums)[:, None] * added
            state = tl.exp(last) * state + tl.dot(tl.trans(k), added, input_precision=PRECISION)
        tl.store(kept, state, mask=is_in)
