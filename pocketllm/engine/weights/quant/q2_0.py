"""Q2_0: 64 values in 18 bytes, w = d · (q - 1), q from 0 to 3. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-17 q: four neighbors in a byte, the first in the lowest two bits.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · (q - 1)."""
    quants = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    np.multiply(quants.reshape(out.shape).view(np.int8) - np.int8(1), half(blocks, 0), out=out)
