"""IQ1_S: 256 values in 50 bytes, w = d · (2 · scale + 1) · (grid ± 1/8). Source: the public ggml block format.

Bytes 0-1 d (float16), 2-33 the low eight bits that pick each eight values from the grid, 34-49 a 16-bit word for each
32 values: three upper bits of four picks, lowest first, a 3-bit scale, and on top the sign of 1/8.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, grid, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (2 · scale + 1)) · (grid ± 1/8)."""
    count = len(blocks)
    words = np.ascontiguousarray(blocks[:, 34:]).view("<u2")
    upper = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    picks = blocks[:, 2:34].reshape(count, 8, 4) | upper << 8
    factors = half(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    shift = np.where(words & 0x8000, np.float32(-0.125), np.float32(0.125))
    groups = out.reshape(count, 8, 4, 8)
    np.add(grid("IQ1_S")[picks], shift[:, :, None, None], out=groups)
    np.multiply(groups, factors[:, :, None, None], out=groups)
