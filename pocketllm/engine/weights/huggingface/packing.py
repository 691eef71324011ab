"""Codes and scales as safetensors have them, each in a tensor of its own, brought into blocks of the quant types.

All take and give uint8, and lose nothing: a value that a block stands for is the one that the tensors stand for. Rows
that are no whole number of blocks are decoded instead (`fp8_values`, `nvfp4_values`).
"""

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.bits import E2M1_DOUBLED, E4M3, Bytes, Floats

MXFP4_GROUP, NVFP4_GROUP = 32, 16
"""Values that share a scale."""
BLOCK = 64
"""Values of a block of FP8 and of NVFP4_SCALED."""
NO_NUMBER = 0xFF
"""The E8M0 code that is NaN (OCP Microscaling Formats 1.0)."""


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """[.., bytes] of neighbors, low nibble first, and their [.., groups] E8M0 → GGUF's MXFP4, [rows, row bytes]."""
    packed = codes.reshape(-1, 16)
    out = np.empty((len(packed), 17), np.uint8)
    out[:, 0] = exponents.reshape(-1)
    out[:, 1:] = halves(packed, MXFP4_GROUP)
    return out.reshape(-1, exponents.shape[-1] * 17)


def nvfp4_blocks(codes: Bytes, scales: Bytes, factor: np.float32) -> Bytes:
    """[rows, bytes] of neighbors and their [rows, groups] E4M3 → NVFP4_SCALED, [rows, row bytes]."""
    out = np.empty((codes.size // 32, 40), np.uint8)
    out[:, :4] = scales.reshape(-1, 4)
    out[:, 4:36] = halves(codes.reshape(-1, 8), NVFP4_GROUP).reshape(-1, 32)
    out[:, 36:] = np.array([factor], "<f4").view(np.uint8)
    return out.reshape(len(codes), -1)


def halves(packed: Bytes, group: int) -> Bytes:
    """Nibbles of neighbors → the first half of a group in low nibbles, the second one in high ones."""
    middle = group // 4
    low, high = packed[:, :middle], packed[:, middle:]
    out = np.empty_like(packed)
    out[:, 0::2] = low & 15 | high << 4
    out[:, 1::2] = low >> 4 | high & 0xF0
    return out


def nvfp4_values(codes: Bytes, scales: Bytes, factor: np.float32) -> Floats:
    """The same as float32 [rows, values]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, NVFP4_GROUP)
    with np.errstate(all="ignore"):
        each = E4M3[scales] * np.float32(0.5) * factor
        return (E2M1_DOUBLED[nibbles] * each[..., None]).reshape(len(codes), -1)


def fp8_blocks(codes: Bytes, scales: Floats, tile: tuple[int, int]) -> Bytes:
    """[rows, cols] E4M3 and the scales of its tiles, cut off at the edges → FP8, [rows, row bytes]."""
    rows, cols = codes.shape
    out = np.empty((rows, cols // BLOCK, BLOCK + 4), np.uint8)
    out[:, :, :BLOCK] = codes.reshape(rows, -1, BLOCK)
    of_blocks = scales[:, np.arange(0, cols, BLOCK) // tile[1]]
    each = of_blocks[np.arange(rows) // tile[0]].astype("<f4")
    out[:, :, BLOCK:] = each[..., None].view(np.uint8)
    return out.reshape(rows, -1)


def fp8_values(codes: Bytes, scales: Floats, tile: tuple[int, int]) -> Floats:
    """The same as float32 [rows, cols]."""
    rows, cols = codes.shape
    of_columns = scales[:, np.arange(cols) // tile[1]]
    with np.errstate(all="ignore"):
        return np.asarray(E4M3[codes] * of_columns[np.arange(rows) // tile[0]], np.float32)


def exponent_scales(codes: Bytes) -> npt.NDArray[np.float32]:
    """2^(e - 127) of each E8M0 code; the code that is no number stays NaN."""
    with np.errstate(over="ignore"):
        scales = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return np.where(codes == NO_NUMBER, np.float32(np.nan), scales)
