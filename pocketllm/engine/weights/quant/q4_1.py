"""Q4_1: 32 values in 20 bytes, w = d · q + m. Source: the public ggml block format.

Bytes 0-1 d, 2-3 m (float16), 4-19 q: low nibbles are values 0-15, high nibbles 16-31.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · q + m, rounded after the product as well."""
    scale, nibbles = half(blocks, 0), blocks[:, 4:]
    np.multiply(nibbles & 15, scale, out=out[:, :16])
    np.multiply(nibbles >> 4, scale, out=out[:, 16:])
    np.add(out, half(blocks, 2), out=out)
