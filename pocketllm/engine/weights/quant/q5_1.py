"""Q5_1: 32 values in 24 bytes, w = d · q + m. Source: the public ggml block format.

Bytes 0-1 d, 2-3 m (float16), 4-7 the fifth bit of values 0-31, 8-23 nibbles: low are values 0-15, high 16-31.
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · q + m, rounded after the product as well."""
    quants = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little") << 4
    quants[:, :16] |= blocks[:, 8:] & 15
    quants[:, 16:] |= blocks[:, 8:] >> 4
    np.multiply(quants, half(blocks, 0), out=out)
    np.add(out, half(blocks, 2), out=out)
