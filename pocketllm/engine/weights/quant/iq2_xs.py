"""IQ2_XS: 256 values in 74 bytes, w = d · (scale + 1/2) / 4 · grid · sign. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-65 a 16-bit word for each eight values: nine bits pick them from the grid, seven are signs;
66-73 a 4-bit scale for each 16 values, low nibble first.
"""

import numpy as np

from pocketllm.engine.weights.bits import EVEN_SIGNS, Bytes, Floats, grid, half, half_nibbles


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale + 1/2) / 4) · grid · sign."""
    count = len(blocks)
    words = np.ascontiguousarray(blocks[:, 2:66]).view("<u2").reshape(count, 16, 2)
    factors = half(blocks, 0) * half_nibbles(blocks[:, 66:]) * np.float32(0.25)
    values = grid("IQ2_XS")[words & 511] * EVEN_SIGNS[words >> 9]
    np.multiply(values, factors[:, :, None, None], out=out.reshape(count, 16, 2, 8))
