"""Bit layouts that several quant types share. All take whole blocks as uint8 [blocks, bytes]."""

from functools import cache

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Signed = npt.NDArray[np.int8]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums of Q4_K and Q5_K, times d and dmin, each [blocks, 8].

    Bytes 0-1 are d, 2-3 dmin, 4-15 eight 6-bit scales and minimums: of j < 4 in the low six bits of bytes j and j + 4,
    of j >= 4 four bits in byte j + 4 and two in the top of bytes j - 4 and j.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return half(blocks, 0) * scales, half(blocks, 2) * minimums


CODEBOOK = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""The 16 values of IQ4_NL and IQ4_XS."""

E2M1_DOUBLED = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Twice the values of a 4-bit float (OCP Microscaling Formats 1.0); a negative zero is a plain one here."""


def e4m3_values() -> Floats:
    """The 256 values of an 8-bit float with 4 bits of exponent and no infinities; 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    values[[0x7F, 0xFF]] = np.nan
    return np.copysign(values, np.where(codes < 128, 1, -1)).astype(np.float32)


E4M3 = e4m3_values()

SIGNS: Signed = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8)
"""[256, 8]: the signs of eight values that a byte holds, lowest bit first; 1 is negative."""

EVEN_SIGNS: Signed = np.concatenate(
    [SIGNS[:128, :7], SIGNS[:128, :7].prod(axis=1, keepdims=True)], axis=1, dtype=np.int8
)
"""[128, 8]: the signs that seven bits hold; the eighth makes the number of negative ones even."""

TRITS: Signed = np.stack([((np.arange(256) * 3**n % 256) * 3 >> 8) - 1 for n in range(5)]).astype(np.int8)
"""[5, 256]: digit n, -1 to 1, of the base-3 fraction that a byte holds, the most significant first."""


@cache
def grid(quant_type: str) -> Signed:
    """The points that IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS or IQ3_S round to: [points, 4 or 8].

    Taken from the `gguf` package, which keeps these tables, when a type is first decoded.
    """
    from gguf import quants

    table = getattr(quants, quant_type)
    table.init_grid()
    points: Signed = table.grid.reshape(table.grid_shape).astype(np.int8)
    return points


def half_nibbles(packed: Bytes) -> Floats:
    """0.5 + each nibble, the low one of a byte first: [blocks, bytes] to [blocks, 2 * bytes]."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return nibbles + np.float32(0.5)
