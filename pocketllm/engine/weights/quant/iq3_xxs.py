"""IQ3_XXS: 256 values in 98 bytes, w = d · (scale + 1/2) / 2 · grid · sign. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-65 pick four values each from the grid, 66-97 a 32-bit word for each 32 values: four times
seven bits of signs of eight values, lowest first, and the scale in its top four.
"""

import numpy as np

from pocketllm.engine.weights.bits import EVEN_SIGNS, Bytes, Floats, grid, half


def decode(blocks: Bytes, out: Floats) -> None:
    """(d · (scale + 1/2) / 2) · grid · sign."""
    words = np.ascontiguousarray(blocks[:, 66:]).view("<u4")
    factors = half(blocks, 0) * ((words >> 28).astype(np.float32) + np.float32(0.5)) * np.float32(0.5)
    signs = EVEN_SIGNS[words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    points = grid("IQ3_XXS")[blocks[:, 2:66]].reshape(signs.shape)
    np.multiply(points * signs, factors[:, :, None, None], out=out.reshape(signs.shape))
