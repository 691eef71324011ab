"""NVFP4_SCALED: 64 values in 40 bytes, w = (E4M3 scale · d) · an E2M1 value. No GGUF type: NVFP4 of safetensors.

Bytes 0-3 a scale for each 16 values (E4M3 with its sign, as torch reads it), 4-35 q: 8 bytes hold 16 values, the low
nibbles first, 36-39 d (float32): the tensor's global scale, as a factor, which is part of a block here.
"""

import numpy as np

from pocketllm.engine.weights.bits import E2M1_DOUBLED, E4M3, Bytes, Floats


def decode(blocks: Bytes, out: Floats) -> None:
    """Half of the scale · d · twice the E2M1 value; only d's product is rounded."""
    count = len(blocks)
    shared = np.ascontiguousarray(blocks[:, 36:]).view("<f4")
    scales = (E4M3[blocks[:, :4]] * np.float32(0.5) * shared)[:, :, None]
    packed, groups = blocks[:, 4:36].reshape(count, 4, 8), out.reshape(count, 4, 16)
    np.multiply(E2M1_DOUBLED[packed & 15], scales, out=groups[:, :, :8])
    np.multiply(E2M1_DOUBLED[packed >> 4], scales, out=groups[:, :, 8:])
