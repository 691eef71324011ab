"""Which experts a token is sent to, and rows of x put together by expert; nothing of it is known to the host.

A pair is a token and one of its experts: pair t · used + r of token t's r-th best. Pairs of one expert, in their order,
are cut into items of at most so many, so that a product reads an expert's weights once for all rows of an item.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait
from pocketllm.engine.backends.cuda.kernels.rows import NO_GATE, gated_by, write_bytes, write_several

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TO_FEW, TO_MANY, TO_FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PAIRS_AT_ONCE = 1024
ITEMS_AT_ONCE = tl.constexpr(64)


@triton.jit
def router_kernel(
    x, norm_weight, weights, bias, logits, x_stride, width, experts, eps,
    LINE: tl.constexpr, EACH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """logits[t, e] = Σ w[e] · x[t] (+ bias) of EACH experts and one token in float32, x normed where HAS_NORM."""
    token = tl.program_id(1)
    e, i = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, LINE)
    is_row = (e < experts)[:, None] & (i < width)[None, :]
    w = tl.load(weights + e[:, None] * width + i[None, :], mask=is_row, other=0.0).to(tl.float32)
    scale = tl.full([LINE], 1.0, tl.float32)
    if HAS_NORM:
        scale = tl.load(norm_weight + i, mask=i < width, other=0.0)
    wait()
    value = tl.load(x + token.to(tl.int64) * x_stride + i, mask=i < width, other=0.0)
    total = tl.sum(w * (value * scale)[None, :], 1)
    if HAS_NORM:
        total *= 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    if HAS_BIAS:
        total += tl.load(bias + e, mask=e < experts, other=0.0)
    tl.store(logits + token * experts + e, total, mask=e < experts)


@triton.jit
def are_better(other, at, own, e):
    """Which of others [axis 0] are before which of one's own [axis 1]: better, or as good and of a lower index."""
    # axis 1 lies across lanes: sums over axis 0 stay in a thread
    other, own = other[:, None], own[None, :]
    return ((other > own) | ((other == own) & (at[:, None] < e[None, :]))).to(tl.int32)


@triton.jit
def ranks_of(logits, z, e, experts, E: tl.constexpr):
    """How many logits are before each; read again some at a time, which takes few registers."""
    some: tl.constexpr = 32 if E > 32 else E
    counts = tl.zeros([some, E], tl.int32)
    for first in tl.range(0, E, some):
        at = first + tl.arange(0, some)
        counts += are_better(tl.load(logits + at, mask=at < experts, other=float("-inf")), at, z, e)
    return tl.sum(counts, 0)


@triton.jit
def in_best_groups(ranked, e, experts, NUM_GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, BEST: tl.constexpr):
    """-inf for experts outside of the best groups: those with the largest sum of their BEST best."""
    size = experts // NUM_GROUPS
    group = e // size
    is_mine = group[:, None] == group[None, :]
    place = tl.sum(tl.where(is_mine, are_better(ranked, e, ranked, e), 0), 0)
    counted = tl.where((place < BEST) & (e < experts), ranked, 0.0)
    strength = tl.sum(tl.where(is_mine, counted[:, None], 0.0), 0)
    is_first = ((e % size == 0) & (e < experts))[:, None]
    place = tl.sum(tl.where(is_first, are_better(strength, group, strength, group), 0), 0)
    return tl.where(place < GROUPS_USED, ranked, float("-inf"))


@triton.jit
def scores_of(z, GATING: tl.constexpr):
    """What a router's logit makes an expert worth by itself: a sigmoid, or the root of ln(1 + eᶻ)."""
    if GATING == SQRT_SOFTPLUS:
        power = tl.exp(tl.minimum(z, 20.0))
        # ln(u) · power / (u - 1) makes good what u = 1 + power has lost (Goldberg 1991)
        u = 1 + power
        worth = tl.where(u == 1, power, tl.log(u) * (power / tl.where(u == 1, 1.0, u - 1)))
        return tl.sqrt(tl.where(z > 20, z, worth))
    else:
        return 1 / (1 + tl.exp(-z))


@triton.jit
def routes_of(
    logits, bias, expert_scale, experts, scale, E: tl.constexpr, GATING: tl.constexpr, NUM_USED: tl.constexpr,
    NORMALIZED: tl.constexpr, HAS_CHOICE: tl.constexpr, HAS_SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Each expert's rank for a token, and what it counts if it is used: [E]."""
    e = tl.arange(0, E)
    z = tl.load(logits + e, mask=e < experts, other=float("-inf"))
    if GATING == SOFTMAX:
        powers = tl.exp(z - tl.max(z, 0))
        scores = powers / tl.sum(powers, 0)
    else:
        scores = scores_of(z, GATING)
    if (GATING == SOFTMAX) and (not HAS_CHOICE) and (NUM_GROUPS == 1):
        rank = ranks_of(logits, z, e, experts, E)  # scores are in the order of logits
    else:
        ranked = scores
        if HAS_CHOICE:
            ranked += tl.load(bias + e, mask=e < experts, other=0.0)
        ranked = tl.where(e < experts, ranked, float("-inf"))
        if NUM_GROUPS > 1:
            ranked = in_best_groups(ranked, e, experts, NUM_GROUPS, GROUPS_USED, BEST)
        rank = tl.sum(are_better(ranked, e, ranked, e), 0)
    weight = scores
    if NORMALIZED:
        weight = scores / tl.sum(tl.where(rank < NUM_USED, scores, 0.0), 0)
    weight *= scale
    if HAS_SCALE:
        weight *= tl.load(expert_scale + e, mask=e < experts, other=0.0)
    return rank, weight


@triton.jit
def expert_at(rank, weight, number, experts, E: tl.constexpr):
    """The expert of one rank, and what it counts; logits that are no numbers name some expert too."""
    is_it = rank == number
    expert = tl.sum(tl.where(is_it, tl.arange(0, E), 0), 0)
    return tl.minimum(expert, experts - 1), tl.sum(tl.where(is_it, weight, 0.0), 0)


@triton.jit
def routes_kernel(
    logits, bias, expert_scale, chosen, weights, experts, scale, E: tl.constexpr, GATING: tl.constexpr,
    NUM_USED: tl.constexpr, NORMALIZED: tl.constexpr, HAS_CHOICE: tl.constexpr, HAS_SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """A token's experts, best first, and their weights: [tokens, NUM_USED]."""
    wait()
    token = tl.program_id(0)
    rank, weight = routes_of(
        logits + token * experts, bias, expert_scale, experts, scale, E, GATING, NUM_USED, NORMALIZED, HAS_CHOICE,
        HAS_SCALE, NUM_GROUPS, GROUPS_USED, BEST,
    )  # fmt: skip
    for number in tl.static_range(NUM_USED):
        expert, own = expert_at(rank, weight, number, experts, E)
        tl.store(chosen + token * NUM_USED + number, expert)
        tl.store(weights + token * NUM_USED + number, own)


@triton.jit
def named_kernel(
    logits, named, chosen, weights, experts, scale,
    USED: tl.constexpr, GATING: tl.constexpr, NUM_USED: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """The same where a token's experts are named, [tokens, NUM_USED], and scores only weigh them."""
    wait()
    token, r = tl.program_id(0), tl.arange(0, USED)
    at, is_in = token * NUM_USED + r, r < NUM_USED
    expert = tl.load(named + at, mask=is_in, other=0)
    scores = scores_of(tl.load(logits + token * experts + expert), GATING)
    weight = scores
    if NORMALIZED:
        weight = scores / tl.sum(tl.where(is_in, scores, 0.0), 0)
    tl.store(chosen + at, expert, mask=is_in)
    tl.store(weights + at, weight * scale, mask=is_in)


@triton.jit
def groups_kernel(
    chosen, slots, pairs, item_experts, item_counts, num_items, num_pairs,
    E: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One expert's pairs: which slot (item · EACH + place) each has, which pair is where, and its items.

    Every program counts all pairs, so that none waits for another.
    """
    wait()
    expert, at = tl.program_id(0), tl.arange(0, CHUNK)
    counts = tl.zeros([2 * E], tl.int32)  # the second half takes what is past the end
    for first in tl.range(0, num_pairs, CHUNK):
        some = tl.load(chosen + first + at, mask=first + at < num_pairs, other=E)
        counts += tl.histogram(some, 2 * E)
    bins = tl.arange(0, 2 * E)
    items = tl.where(bins < E, (counts + EACH - 1) // EACH, 0)
    base = tl.sum(tl.where(bins < expert, items, 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    if expert == 0:
        tl.store(num_items, tl.sum(items, 0))
    for first in tl.range(0, tl.cdiv(own, EACH), ITEMS_AT_ONCE):
        item = first + tl.arange(0, ITEMS_AT_ONCE)
        is_in = item * EACH < own
        tl.store(item_experts + base + item, expert + item * 0, mask=is_in)
        tl.store(item_counts + base + item, tl.minimum(own - item * EACH, EACH), mask=is_in)
    before = 0
    for first in tl.range(0, num_pairs, CHUNK):
        some = tl.load(chosen + first + at, mask=first + at < num_pairs, other=E)
        is_own = some == expert
        place = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        slot = base * EACH + place
        tl.store(slots + first + at, slot, mask=is_own)
        tl.store(pairs + slot, first + at, mask=is_own)
        before += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def gather_kernel(
    x, up, norm_weight, slots, out, out_marks, out_sums, x_stride, up_stride, width, units, eps, slope, limit,
    EACH: tl.constexpr, LINES: tl.constexpr, GATE: tl.constexpr, HAS_NORM: tl.constexpr, TO: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Row pair // EACH of x, normed or gating `up`, where its slot's product reads it; or as floats, pair by pair.

    TO_MANY: float16 times a power of two for the row; of a block the first halves of its units and then the second, of
    each [4 places, 4 units, 4 neighbors] as words of weights lie.
    """
    wait()
    pair = tl.program_id(0)
    row, line = (pair // EACH).to(tl.int64), tl.arange(0, LINES)
    at = line[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = at < width
    value = tl.load(x + row * x_stride + at, mask=is_in, other=0.0)
    if GATE != NO_GATE:
        value = gated_by(value, tl.load(up + row * up_stride + at, mask=is_in, other=0.0), slope, limit, GATE)
    if HAS_NORM:
        mean = tl.sum(tl.sum(value * value, 1), 0) / width
        value = value * (1 / tl.sqrt(mean + eps)) * tl.load(norm_weight + at, mask=is_in, other=0.0)
    value = tl.where(is_in, value, 0.0)  # a bounded gate makes something of nothing
    if TO == TO_FLOATS:
        tl.store(out + pair.to(tl.int64) * width + at, value, mask=is_in)
    else:
        slot = tl.load(slots + pair)
        if TO == TO_FEW:
            write_several(out, out_sums, out_marks, value, slot, slot.to(tl.int64), units, TOGETHER)
        else:
            # the largest becomes 32 to 64, as of other rows of prompts
            exponent = (tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23) - 132
            exponent = tl.minimum(tl.maximum(exponent, -120), 120)
            inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
            i = tl.arange(0, 32)[None, :]
            to = line[:, None] // 4 * 128 + i // 16 * 64 + (i % 16 // 4 * 4 + line[:, None] % 4) * 4 + i % 4
            to += slot.to(tl.int64) * (units * 32)
            tl.store(out + to, (value * inverse).to(tl.float16), mask=(line < units)[:, None])
            tl.store(out_marks + slot, ((127 + exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def sum_kernel(
    parts, weights, residual, y, next_weight, out, out_marks, out_squares, residual_stride, width, out_units,
    NUM_USED: tl.constexpr, LINES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    """y[t] = (residual +) Σ weight · part over a token's pairs, rank after rank; HAS_NEXT: as `single.finish`, of a
    single token."""
    wait()
    token = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    at = line[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_in = at < width
    total = tl.zeros([LINES, 32], tl.float32)
    for rank in tl.static_range(NUM_USED):
        pair = token * NUM_USED + rank
        total += tl.load(weights + pair) * tl.load(parts + pair * width + at, mask=is_in, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * residual_stride + at, mask=is_in, other=0.0)
    tl.store(y + token * width + at, total, mask=is_in)
    if HAS_NEXT:
        tl.store(out_squares + token * (width // 32) + line, tl.sum(total * total, 1), mask=line < width // 32)
        total *= tl.load(next_weight + at, mask=is_in, other=0.0)
        write_bytes(out, out_marks, total, line, out_units)
