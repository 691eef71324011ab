"""The likeliest token of a row of logits, and tokens that a step takes from where they were drawn."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def maxima_kernel(logits, tops, places, vocab, stride, CHUNK: tl.constexpr):
    """Of each chunk of a row the largest value and the lowest place that holds it; NaN counts as infinite."""
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + place, mask=place < vocab, other=float("-inf"))
    value = tl.where(value != value, float("inf"), value)
    top = tl.max(value, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops + at, top)
    tl.store(places + at, tl.min(tl.where(value == top, place, vocab), 0))


@triton.jit
def likeliest_kernel(
    tops, places, own_tops, token_ids, largest, num_chunks,
    NOT_FINITE: tl.constexpr, FORBIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's likeliest token and its logit; own_tops: of the logits as the model gave them."""
    wait()
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    is_in = chunk < num_chunks
    value = tl.load(tops + row * num_chunks + chunk, mask=is_in, other=float("-inf"))
    own = tl.max(tl.load(own_tops + row * num_chunks + chunk, mask=is_in, other=float("-inf")), 0)
    place = tl.load(places + row * num_chunks + chunk, mask=is_in, other=2147483647)
    top = tl.max(value, 0)
    token_id = tl.min(tl.where(value == top, place, 2147483647), 0)
    refusal = tl.where((own < float("inf")) & (own > float("-inf")), FORBIDDEN, NOT_FINITE)
    is_finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(largest + row, top)
    tl.store(token_ids + row, tl.where(is_finite, token_id, refusal))


@triton.jit
def resolve_kernel(input_ids, drawn, num_tokens, BLOCK: tl.constexpr):
    """Put the token that was drawn for row r in the place of each `-1 - r`; 0 where none could be drawn."""
    wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(input_ids + at, mask=at < num_tokens, other=0)
    token_id = tl.load(drawn + (-1 - given), mask=given < 0, other=0)
    tl.store(input_ids + at, tl.maximum(token_id, 0), mask=given < 0)
