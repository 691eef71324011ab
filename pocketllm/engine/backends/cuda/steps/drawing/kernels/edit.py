"""What the host changes of logits before a token is drawn: tokens that are not allowed, and single logits."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.launch import wait


@triton.jit
def allow_kernel(logits, words, edited, vocab, stride, CHUNK: tl.constexpr):
    """A copy of logits in which tokens that are not allowed are -inf.

    words: of each row, where its bits of allowed tokens begin among words, or -1: all are allowed; then the bits.
    """
    wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + place, mask=place < vocab, other=0.0)
    bits = tl.load(words + row)
    word = tl.load(words + bits + place // 32, mask=place < tl.where(bits >= 0, vocab, 0), other=-1)
    value = tl.where(((word >> (place % 32)) & 1) != 0, value, float("-inf"))
    tl.store(edited + row * vocab + place, value, mask=place < vocab)


@triton.jit(do_not_specialize=("first", "count"))
def edit_kernel(edited, words, first, count, BLOCK: tl.constexpr):
    """Change single logits: from `first` among words on their places, then values, then whether each divides."""
    wait()
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = number < count
    place = tl.load(words + first + number, mask=is_in, other=0)
    operand = tl.load(words + first + count + number, mask=is_in, other=0).to(tl.float32, bitcast=True)
    divides = tl.load(words + first + 2 * count + number, mask=is_in, other=0)
    value = tl.load(edited + place, mask=is_in, other=0.0)
    factored = tl.where(value > 0, tl.div_rn(value, operand), value * operand)
    tl.store(edited + place, tl.where(divides != 0, factored, value + operand), mask=is_in)
