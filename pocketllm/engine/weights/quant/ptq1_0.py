"""PTQ1_0 (vendor type 143): 128 values in 28 bytes, w = d · t, t from -1 to 1; a zero is never -0.

Bytes 0-25 hold base-3 digits (`bits.TRITS`), 26-27 d (float16). The first digits of bytes 0-15 are values 0-15, their
second digits 16-31, and so on to 79; then five digits each of bytes 16-23, then four each of bytes 24-25.
"""

import numpy as np

from pocketllm.engine.weights.bits import TRITS, Bytes, Floats, half

SECTIONS = ((0, 16, 5), (16, 24, 5), (24, 26, 4))
"""(first byte, end, digits of each byte)"""


def decode(blocks: Bytes, out: Floats) -> None:
    """d · t."""
    scale, at = half(blocks, 26), 0
    for first, end, digits in SECTIONS:
        for digit in range(digits):
            np.multiply(TRITS[digit][blocks[:, first:end]], scale, out=out[:, at : at + end - first])
            at += end - first
    np.add(out, np.float32(0.0), out=out)  # -0 + 0 is 0
