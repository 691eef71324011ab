"""Q2_K: 256 values in 84 bytes, w = (d · scale) · q - dmin · minimum. Source: the public ggml block format.

Bytes 0-15 a scale (low nibble) and a minimum (high nibble) for each 16 values, 16-79 q, 80-81 d, 82-83 dmin (float16).
Each half of 128 values has 32 bytes of q: bits 0-1 are its values 0-31, bits 2-3 its values 32-63, and so on.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · scale) · q - dmin · minimum."""
    count = len(blocks)
    scales = half(blocks, 80) * (blocks[:, :16] & 15)
    minimums = half(blocks, 82) * (blocks[:, :16] >> 4)
    packed = blocks[:, 16:80].reshape(count, 2, 32)
    quants = np.empty((count, 2, 4, 32), np.uint8)
    for part in range(4):
        quants[:, :, part] = (packed >> (2 * part)) & 3
    groups = out.reshape(count, 16, 16)
    np.multiply(quants.reshape(count, 16, 16), scales[:, :, None], out=groups)
    np.subtract(groups, minimums[:, :, None], out=groups)
