"""IQ1_M: 256 values in 56 bytes, w = d · (2 · scale + 1) · (grid ± 1/8). Source: the public ggml block format.

Bytes 0-31 the low eight bits that pick each eight values from the grid, 32-47 a nibble for each eight values, low
first: three upper bits of the pick and the sign of 1/8; 48-55 four 16-bit words, each with four 3-bit scales of 16
values, lowest first, and on top a nibble of d (float16), the first word's lowest.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, grid


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (2 · scale + 1)) · (grid ± 1/8)."""
    count = len(blocks)
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")
    pieces = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(count, 16)
    nibbles = np.stack([blocks[:, 32:48] & 15, blocks[:, 32:48] >> 4], axis=-1).reshape(count, 32)
    shift = np.where(nibbles & 8, np.float32(-0.125), np.float32(0.125))
    groups = out.reshape(count, 32, 8)
    np.add(grid("IQ1_S")[blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8], shift[:, :, None], out=groups)
    factors = scale * (2 * scales + 1)
    sixteens = out.reshape(count, 16, 16)
    np.multiply(sixteens, factors[:, :, None], out=sixteens)
