"""Tokens drawn from weights: what chunks of a row amount to, where top-k and top-p end, and the token of a share.

A weight is rounded to float32 once, from float64, and weights are summed as whole multiples of 1 / UNITS, so that no
order of summing changes a sum. The largest weight is 1, and 2^19 of them, more than any vocabulary has, still fit 64
bits. Rows without temperature, and rows that have no token, are left as they are.
"""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait

UNITS = tl.constexpr(2.0**44)
TEMPERATURE, TOP_K, TOP_P, MIN_P, SHARE = (tl.constexpr(column) for column in range(5))
PARAMS = tl.constexpr(5)
"""Columns of what is told of each row, in float64; as in `Draw`."""


@triton.jit
def is_drawn(asked, token_ids, row):
    """Whether a row has a temperature, and logits that name a distribution."""
    return (tl.load(asked + row * PARAMS + TEMPERATURE) > 0) & (tl.load(token_ids + row) >= 0)


@triton.jit
def weighed(values, place, vocab, top, asked, row):
    """Logits at some places of a row, and exp((logit - top) / temperature); behind the row -inf and 0."""
    value = tl.load(values + place, mask=place < vocab, other=float("-inf"))
    heat = tl.load(asked + row * PARAMS + TEMPERATURE).to(tl.float32)
    # exp in float64, rounded once: the same on every device
    return value, tl.exp(tl.div_rn(value - top, heat).to(tl.float64)).to(tl.float32)


@triton.jit
def amounts_of(weights):
    """Weights as whole numbers of units."""
    return (weights.to(tl.float64) * UNITS).to(tl.int64)


@triton.jit
def last_of(descending, vocab, asked, row):
    """The least logit that top-k leaves."""
    top_k = tl.load(asked + row * PARAMS + TOP_K).to(tl.int64)
    return tl.load(descending + tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab) - 1)


@triton.jit
def sorted_sums_kernel(descending, largest, token_ids, asked, sums, vocab, stride, CHUNK: tl.constexpr):
    """What each chunk of a row's logits in descending order amounts to, of those that top-k leaves."""
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(asked, token_ids, row):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        own = descending + row * stride
        value, weight = weighed(own, place, vocab, tl.load(largest + row), asked, row)
        amounts = amounts_of(tl.where(value >= last_of(own, vocab, asked, row), weight, 0.0))
        tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(amounts, 0))


@triton.jit
def edges_kernel(
    descending, largest, token_ids, asked, sums, edges, num_ties, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's least logit by top-k and least weight by top-p, and how many of that weight stay: those of lowest ids."""
    wait()
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(asked, token_ids, row):
        own, top = descending + row * stride, tl.load(largest + row)
        chunk, lane = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
        some = tl.load(sums + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        wanted = tl.load(asked + row * PARAMS + TOP_P) * tl.sum(some, 0).to(tl.float64)
        is_before = tl.cumsum(some, 0).to(tl.float64) < wanted
        at = tl.sum(is_before.to(tl.int32), 0)
        # what top-k leaves out comes behind the place that is looked for
        _, weight = weighed(own, at * CHUNK + lane, vocab, top, asked, row)
        running = tl.sum(tl.where(is_before, some, 0), 0) + tl.cumsum(amounts_of(weight), 0)
        inside = tl.sum((running.to(tl.float64) < wanted).to(tl.int32), 0)
        lightest = tl.max(tl.where(lane == inside, weight, 0.0), 0)
        # the first of that weight lies in the last chunk that begins with a larger one, or begins the next
        _, first = weighed(own, chunk * CHUNK, vocab, top, asked, row)
        begun = tl.maximum(tl.sum((first > lightest).to(tl.int32), 0) - 1, 0)
        _, weight = weighed(own, begun * CHUNK + lane, vocab, top, asked, row)
        num_heavier = begun * CHUNK + tl.sum((weight > lightest).to(tl.int32), 0)
        tl.store(edges + row * 2, last_of(own, vocab, asked, row))
        tl.store(edges + row * 2 + 1, lightest)
        tl.store(num_ties + row, at * CHUNK + inside + 1 - num_heavier)


@triton.jit
def sums_kernel(
    logits, largest, token_ids, asked, edges, sums, ties, vocab, stride, HAS_EDGES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """What is left of each chunk of a row; without weights at the edge, which are counted."""
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(asked, token_ids, row):
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        value, weight = weighed(logits + row * stride, place, vocab, tl.load(largest + row), asked, row)
        is_kept = weight >= tl.load(asked + row * PARAMS + MIN_P).to(tl.float32)
        at = row * tl.num_programs(1) + chunk
        if HAS_EDGES:
            last, lightest = tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
            is_kept = is_kept & (weight > lightest)
            tl.store(ties + at, tl.sum(((weight == lightest) & (value >= last)).to(tl.int32), 0))
        tl.store(sums + at, tl.sum(amounts_of(tl.where(is_kept, weight, 0.0)), 0))


@triton.jit
def token_kernel(
    logits, largest, token_ids, asked, edges, num_ties, sums, ties, vocab, stride, num_chunks,
    HAS_EDGES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's token: the first up to which more lies than its share of what is left."""
    wait()
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(asked, token_ids, row):
        chunk = tl.arange(0, BLOCK)
        is_in = chunk < num_chunks
        some = tl.load(sums + row * num_chunks + chunk, mask=is_in, other=0)
        min_p = tl.load(asked + row * PARAMS + MIN_P).to(tl.float32)
        if HAS_EDGES:
            last, lightest = tl.load(edges + row * 2), tl.load(edges + row * 2 + 1)
            kept_ties = tl.load(num_ties + row)
            counts = tl.load(ties + row * num_chunks + chunk, mask=is_in, other=0)
            earlier = tl.cumsum(counts, 0) - counts
            kept = tl.minimum(tl.maximum(kept_ties - earlier, 0), counts)
            some += kept.to(tl.int64) * amounts_of(tl.where(lightest >= min_p, lightest, 0.0))
        total = tl.sum(some, 0)
        # less than the total, for a share is less than one
        share = tl.load(asked + row * PARAMS + SHARE)
        target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
        is_before = tl.cumsum(some, 0) <= target
        at = tl.sum(is_before.to(tl.int32), 0)
        place = at * CHUNK + tl.arange(0, CHUNK)
        value, weight = weighed(logits + row * stride, place, vocab, tl.load(largest + row), asked, row)
        is_kept = weight >= min_p
        if HAS_EDGES:
            is_tie = (weight == lightest) & (value >= last)
            rank = tl.sum(tl.where(chunk == at, earlier, 0), 0) + tl.cumsum(is_tie.to(tl.int32), 0)
            is_kept = is_kept & ((weight > lightest) | (is_tie & (rank <= kept_ties)))
        running = tl.cumsum(amounts_of(tl.where(is_kept, weight, 0.0)), 0)
        running += tl.sum(tl.where(is_before, some, 0), 0)
        token_id = at * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
        tl.store(token_ids + row, tl.minimum(token_id, vocab - 1))
