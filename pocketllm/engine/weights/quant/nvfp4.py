"""NVFP4: 64 values in 36 bytes, w = half an unsigned E4M3 scale · twice an E2M1 value. Source: the public ggml format.

Bytes 0-3 a scale for each 16 values, 4-35 q: 8 bytes hold 16 values, the low nibbles first. A tensor's own global scale
lies beside it in the file and is not part of a block.
"""

import numpy as np

from pocketllm.engine.weights.bits import E2M1_DOUBLED, Bytes, Floats


def half_scales() -> Floats:
    """Half of each E4M3 value; the sign bit is not looked at, and 0x7f, which is no number, is zero."""
    exponent, mantissa = np.arange(256) >> 3 & 15, (np.arange(256) & 7).astype(np.float32)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7)) / 2
    values[0x7F] = 0.0
    return values.astype(np.float32)


SCALES = half_scales()


def decode(blocks: Bytes, out: Floats) -> None:
    """Half the scale · twice the E2M1 value."""
    count = len(blocks)
    scales, packed = SCALES[blocks[:, :4, None]], blocks[:, 4:].reshape(count, 4, 8)
    groups = out.reshape(count, 4, 16)
    np.multiply(E2M1_DOUBLED[packed & 15], scales, out=groups[:, :, :8])
    np.multiply(E2M1_DOUBLED[packed >> 4], scales, out=groups[:, :, 8:])
