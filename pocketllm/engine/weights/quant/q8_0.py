"""Q8_0: 32 values in 34 bytes, w = d · q. Source: the public ggml block format.

Bytes 0-1 d (float16), 2-33 q (int8).
"""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats, half


def decode(blocks: Bytes, out: Floats) -> None:
    """d · q."""
    np.multiply(blocks[:, 2:].view(np.int8), half(blocks, 0), out=out)
