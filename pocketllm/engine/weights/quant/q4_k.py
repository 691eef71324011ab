"""Q4_K: 256 values in 144 bytes, w = (d · scale) · q - dmin · minimum. Source: the public ggml block format.

Bytes 0-15 as in `bits.k_scales`, 16-143 q: each 32 bytes hold 64 values, the low nibbles first.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, k_scales


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · scale) · q - dmin · minimum."""
    count = len(blocks)
    scales, minimums = k_scales(blocks)
    packed, pairs = blocks[:, 16:].reshape(count, 4, 32), out.reshape(count, 4, 2, 32)
    np.multiply(packed & 15, scales[:, 0::2, None], out=pairs[:, :, 0])
    np.multiply(packed >> 4, scales[:, 1::2, None], out=pairs[:, :, 1])
    groups = out.reshape(count, 8, 32)
    np.subtract(groups, minimums[:, :, None], out=groups)
