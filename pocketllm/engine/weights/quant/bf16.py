"""BF16: the upper 16 bits of a float32, little-endian. Source: the GGUF specification (ggml)."""

import numpy as np

from pocketllm.engine.weights.bits import Bytes, Floats


def decode(blocks: Bytes, out: Floats) -> None:
    """2 bytes a value."""
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32))
