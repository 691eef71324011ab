"""IQ2_XXS: 256 values in 66 bytes, w = d · (scale + 1/2) / 4 · grid · sign. Source: the public ggml block format.

Bytes 0-1 d (float16); then for each 32 values four bytes that pick eight values each from the grid, and a 32-bit word:
four times seven bits of signs, lowest first, and the scale in its top four.
"""

import numpy as np

from pocketllm.engine.weights.bits import EVEN_SIGNS, Bytes, Floats, grid, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale + 1/2) / 4) · grid · sign."""
    count = len(blocks)
    packed = blocks[:, 2:].reshape(count, 8, 8)
    words = np.ascontiguousarray(packed[:, :, 4:]).view("<u4")
    factors = half(blocks, 0) * ((words[:, :, 0] >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.25)
    signs = EVEN_SIGNS[words >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    points = grid("IQ2_XXS")[packed[:, :, :4]]
    np.multiply(points * signs, factors[:, :, None, None], out=out.reshape(count, 8, 4, 8))
