"""IQ4_NL: 32 values in 18 bytes, w = d · codebook[q]. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-17 q: low nibbles are values 0-15, high nibbles 16-31.
"""

import numpy as np

from pocketllm.engine.weights.bits import CODEBOOK, Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · codebook[q]."""
    scale, nibbles = half(blocks, 0), blocks[:, 2:]
    np.multiply(CODEBOOK[nibbles & 15], scale, out=out[:, :16])
    np.multiply(CODEBOOK[nibbles >> 4], scale, out=out[:, 16:])
