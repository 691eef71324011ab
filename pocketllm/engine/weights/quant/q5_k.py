"""Q5_K: 256 values in 176 bytes, w = (d · scale) · q - dmin · minimum. Source: the public ggml block format.

Bytes 0-15 as in `bits.k_scales`, 16-47 the fifth bits (bit j of byte l is for value l of the j-th 32), 48-175 nibbles:
each 32 bytes hold 64 values, the low nibbles first.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, k_scales


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · scale) · q - dmin · minimum."""
    count = len(blocks)
    scales, minimums = k_scales(blocks)
    fifth, packed = blocks[:, 16:48], blocks[:, 48:].reshape(count, 4, 32)
    quants = np.empty((count, 8, 32), np.uint8)
    for group in range(8):
        nibbles = packed[:, group // 2] >> 4 if group % 2 else packed[:, group // 2] & 15
        quants[:, group] = nibbles | ((fifth >> group) & 1) << 4
    groups = out.reshape(count, 8, 32)
    np.multiply(quants, scales[:, :, None], out=groups)
    np.subtract(groups, minimums[:, :, None], out=groups)
