"""FP8: 64 values in 68 bytes, w = d · an E4M3 value. No GGUF type: what FP8 weights of safetensors become.

Bytes 0-63 the values (E4M3 without infinities, OCP 8-bit Floating Point Specification 1.0; 0x7f and 0xff are no
numbers and stay NaN), 64-67 d (float32): the scale of the values' tile, row or tensor, whichever share one there.
"""

import numpy as np

from pocketllm.engine.weights.bits import E4M3, Bytes, Floats


def decode(blocks: Bytes, out: Floats) -> None:
    """d · value."""
    np.multiply(E4M3[blocks[:, :64]], np.ascontiguousarray(blocks[:, 64:]).view("<f4"), out=out)
