"""IQ3_S: 256 values in 110 bytes, w = d · (2 · scale + 1) · grid · sign. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-65 the low eight bits that pick each four values from the grid, 66-73 a ninth bit of eight
picks each, lowest first, 74-105 signs, 106-109 a 4-bit scale for each 32 values, low nibble first.
"""

import numpy as np

from pocketllm.engine.weights.bits import SIGNS, Bytes, Floats, grid, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (2 · scale + 1)) · grid · sign."""
    count = len(blocks)
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    points = grid("IQ3_S")[blocks[:, 2:66] | ninth.astype(np.uint16) << 8]
    scales = np.stack([blocks[:, 106:] & 15, blocks[:, 106:] >> 4], axis=-1).reshape(count, 8)
    factors = half(blocks, 0) * (1 + 2 * scales)
    values = points.reshape(count, 8, 32) * SIGNS[blocks[:, 74:106]].reshape(count, 8, 32)
    np.multiply(values, factors[:, :, None], out=out.reshape(count, 8, 32))
