"""Q4_0: 32 values in 18 bytes, w = d · (q - 8). Source: the public ggml block format.

Bytes 0-1 d (float16), 2-17 q: low nibbles are values 0-15, high nibbles 16-31.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · (q - 8)."""
    scale, nibbles = half(blocks, 0), blocks[:, 2:]
    np.multiply((nibbles & 15).view(np.int8) - np.int8(8), scale, out=out[:, :16])
    np.multiply((nibbles >> 4).view(np.int8) - np.int8(8), scale, out=out[:, 16:])
