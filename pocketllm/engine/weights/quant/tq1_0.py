"""TQ1_0: 256 values in 54 bytes, w = d · t, t from -1 to 1. Source: the public ggml block format.

Bytes 0-51 hold base-3 digits (`bits.TRITS`), 52-53 d (float16). The first digits of bytes 0-31 are values 0-31, their
second digits 32-63, and so on to 159; then five digits each of bytes 32-47, then four each of bytes 48-51.
"""

import numpy as np

from pocketllm.engine.weights.bits import TRITS, Bytes, Floats, half

SECTIONS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
"""(first byte, end, digits of each byte)"""


def decode(blocks: Bytes, out: Floats) -> None:
    """d · t."""
    scale, at = half(blocks, 52), 0
    for first, end, digits in SECTIONS:
        for digit in range(digits):
            np.multiply(TRITS[digit][blocks[:, first:end]], scale, out=out[:, at : at + end - first])
            at += end - first
