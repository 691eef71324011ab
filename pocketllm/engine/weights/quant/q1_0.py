"""Q1_0: 128 values in 18 bytes, w = d where a bit is set, else -d. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-17 a bit for each value, lowest first.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · (2 · bit - 1)."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").view(np.int8)
    np.multiply(2 * bits - 1, half(blocks, 0), out=out)
