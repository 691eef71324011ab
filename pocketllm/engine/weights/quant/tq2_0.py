"""TQ2_0: 256 values in 66 bytes, w = d · (q - 1), q from 0 to 3. Source: the public ggml block format.

Bytes 0-63 q, 64-65 d (float16). Each 32 bytes hold 128 values: bits 0-1 are its values 0-31, bits 2-3 its values 32-63,
and so on.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · (q - 1)."""
    count = len(blocks)
    quants = blocks[:, :64].reshape(count, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    np.multiply(quants.reshape(count, 256).view(np.int8) - np.int8(1), half(blocks, 64), out=out)
