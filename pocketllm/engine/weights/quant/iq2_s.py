"""IQ2_S: 256 values in 82 bytes, w = d · (scale + 1/2) / 4 · grid · sign. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-33 the low eight bits that pick each eight values from the grid, 34-65 their signs, 66-73 two
upper bits of four picks each, lowest first, 74-81 a 4-bit scale for each 16 values, low nibble first.
"""

import numpy as np

from pocketllm.engine.weights.bits import SIGNS, Bytes, Floats, grid, half, half_nibbles


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale + 1/2) / 4) · grid · sign."""
    count = len(blocks)
    upper = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    picks = blocks[:, 2:34] | upper.reshape(count, 32).astype(np.uint16) << 8
    factors = half(blocks, 0) * half_nibbles(blocks[:, 74:]) * np.float32(0.25)
    values = grid("IQ2_S")[picks] * SIGNS[blocks[:, 34:66]]
    np.multiply(values.reshape(count, 16, 16), factors[:, :, None], out=out.reshape(count, 16, 16))
