"""MXFP4: 32 values in 17 bytes, w = 2^(e - 128) · twice an E2M1 value. Source: the public ggml block format.

Byte 0 e (E8M0), 1-16 q: low nibbles are values 0-15, high nibbles 16-31 (not neighbors, as other containers pack them).
"""

import numpy as np

from pocketllm.engine.weights.bits import E2M1_DOUBLED, Bytes, Floats

SCALES = np.ldexp(np.float32(1.0), np.arange(256) - 128).astype(np.float32)
"""Half of 2^(e - 127) for every e; the first two are subnormal."""


def decode(blocks: Bytes, out: Floats) -> None:
    """2^(e - 128) · twice the E2M1 value."""
    scale, nibbles = SCALES[blocks[:, :1]], blocks[:, 1:]
    np.multiply(E2M1_DOUBLED[nibbles & 15], scale, out=out[:, :16])
    np.multiply(E2M1_DOUBLED[nibbles >> 4], scale, out=out[:, 16:])
