"""Q5_0: 32 values in 22 bytes, w = d · (q - 16). Source: the public ggml block format.

Bytes 0-1 d (float16), 2-5 the fifth bit of values 0-31, 6-21 nibbles: low are values 0-15, high 16-31.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · (q - 16)."""
    quants = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    quants[:, :16] |= blocks[:, 6:] & 15
    quants[:, 16:] |= blocks[:, 6:] >> 4
    np.multiply(quants.view(np.int8) - np.int8(16), half(blocks, 0), out=out)
