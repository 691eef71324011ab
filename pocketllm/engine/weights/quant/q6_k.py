"""Q6_K: 256 values in 210 bytes, w = (d · scale) · (q - 32). Source: the public ggml block format.

Bytes 0-127 four low bits each, 128-191 two upper bits each, 192-207 sixteen int8 scales, 208-209 d (float16).
Each half of 128 values has 64 low and 32 upper bytes; its values 0-31, 32-63, 64-95, 96-127 take the low nibbles of its
first and second 32 low bytes, then the high nibbles, and bits 0-1, 2-3, 4-5, 6-7 of the upper bytes.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · scale) · (q - 32)."""
    count = len(blocks)
    low, upper = blocks[:, :128].reshape(count, 2, 2, 32), blocks[:, 128:192].reshape(count, 2, 32)
    quants = np.empty((count, 2, 4, 32), np.uint8)
    for part in range(4):
        nibbles = low[:, :, part % 2] >> 4 if part >= 2 else low[:, :, part % 2] & 15
        quants[:, :, part] = nibbles | ((upper >> (2 * part)) & 3) << 4
    signed = quants.view(np.int8).reshape(count, 16, 16) - np.int8(32)
    factors = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(signed, factors[:, :, None], out=out.reshape(count, 16, 16))
