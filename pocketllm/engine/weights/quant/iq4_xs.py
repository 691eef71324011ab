"""IQ4_XS: 256 values in 136 bytes, w = (d · (scale - 32)) · codebook[q]. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-3 the upper two bits of eight 6-bit scales (scale 0 lowest), 4-7 their low four bits, low
nibble first, 8-135 q: 16 bytes hold 32 values, the low nibbles first.
"""

import numpy as np

from pocketllm.engine.weights.bits import CODEBOOK, Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale - 32)) · codebook[q]."""
    count = len(blocks)
    scales = np.empty((count, 8), np.uint8)
    for group in range(8):
        low = blocks[:, 4 + group // 2] >> (4 * (group % 2)) & 15
        upper = blocks[:, 2 + group // 4] >> (2 * (group % 4)) & 3
        scales[:, group] = low | upper << 4
    factors = half(blocks, 0) * (scales.view(np.int8) - np.int8(32))
    packed, groups = blocks[:, 8:].reshape(count, 8, 16), out.reshape(count, 8, 32)
    np.multiply(CODEBOOK[packed & 15], factors[:, :, None], out=groups[:, :, :16])
    np.multiply(CODEBOOK[packed >> 4], factors[:, :, None], out=groups[:, :, 16:])
