"""Q3_K: 256 values in 110 bytes, w = (d · (scale - 32)) · q, q from -4 to 3. Source: the public ggml block format.

Bytes 0-31 high bits, 32-95 two low bits each, 96-107 sixteen 6-bit scales, 108-109 d (float16).
Each half of 128 values has 32 bytes of low bits: bits 0-1 are its values 0-31, bits 2-3 its values 32-63, and so on;
bit 4·half + part of the high bytes is set where 4 is *not* to be taken away.
Scale i has its low four bits in bytes 0-7 (low nibbles first, then high) and its upper two in bytes 8-11.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale - 32)) · (low bits - 4 where the high bit is clear)."""
    count = len(blocks)
    high, packed = blocks[:, :32], blocks[:, 32:96].reshape(count, 2, 32)
    low, upper = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    for part in range(4):
        scales[:, 4 * part : 4 * part + 4] |= ((upper >> (2 * part)) & 3) << 4
    quants = np.empty((count, 2, 4, 32), np.int8)
    for part in range(4):
        for side in range(2):
            bits = (packed[:, side] >> (2 * part)) & 3 | ((high >> (4 * side + part)) & 1) << 2
            quants[:, side, part] = bits.view(np.int8) - np.int8(4)
    factors = half(blocks, 108) * (scales.view(np.int8) - np.int8(32))
    np.multiply(quants.reshape(count, 16, 16), factors[:, :, None], out=out.reshape(count, 16, 16))
