"""Types with blocks of 256 values whose groups have small scales of their own: the K types and IQ4_XS.

Source of the block formats: the public ggml format; the decoders in `weights/quant` say each in words.
"""

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.packing import Parts
from pocketllm.engine.backends.cuda.quant.blocks_32 import half, nibbles


def grouped(values: Tensor, group: int) -> Tensor:
    """[rows, blocks, …256 in all] → [rows, groups, group]."""
    return values.reshape(len(values), -1, group)


def in_rows(values: Tensor) -> Tensor:
    """[rows, blocks, n] → [rows, blocks · n]."""
    return values.reshape(len(values), -1)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minimums of Q4_K and Q5_K, 6 bits each."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1)
    return in_rows(scales), in_rows(minimums)


def pairs_of_32(packed: Tensor) -> Tensor:
    """Each 32 bytes hold 64 values, the low nibbles first: [rows, blocks, 128] → [rows, blocks, 8, 32]."""
    by_32 = packed.reshape(*packed.shape[:-1], 4, 32)
    return torch.stack([by_32 & 15, by_32 >> 4], -2).flatten(-3, -2)


def split_q4_k(blocks: Tensor) -> Parts:
    """Two float16, eight scales and minimums, nibbles."""
    codes = grouped(pairs_of_32(blocks[..., 16:]), 32)
    return Parts(codes, *k_scales(blocks), half(blocks, 0), half(blocks, 2))


def split_q5_k(blocks: Tensor) -> Parts:
    """The same with fifth bits, bit j of a byte for the j-th 32 values."""
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((blocks[..., None, 16:48] >> groups) & 1) << 4
    codes = grouped(pairs_of_32(blocks[..., 48:]) | fifth, 32)
    return Parts(codes, *k_scales(blocks), half(blocks, 0), half(blocks, 2))


def two_bits(packed: Tensor) -> Tensor:
    """Each 32 bytes hold 128 values, two bits each, lowest first: [rows, blocks, 64] → [rows, blocks, 2, 4, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.reshape(*packed.shape[:-1], 2, 1, 32) >> shifts) & 3


def split_q2_k(blocks: Tensor) -> Parts:
    """Sixteen scales and minimums of four bits, then two bits a value."""
    both = in_rows(blocks[..., :16])
    codes = grouped(two_bits(blocks[..., 16:80]), 16)
    return Parts(codes, both & 15, both >> 4, half(blocks, 80), half(blocks, 82))


def split_q3_k(blocks: Tensor) -> Parts:
    """Third bits, two bits a value, sixteen scales of six bits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(2, 4, 1)
    third = ((blocks[..., None, None, :32] >> shifts) & 1) << 2
    codes = grouped(two_bits(blocks[..., 32:96]) | third, 16)
    low, upper = blocks[..., 96:104], blocks[..., 104:108]
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    scales = nibbles(low) | (((upper[..., None, :] >> pairs) & 3) << 4).flatten(-2)
    return Parts(codes, in_rows(scales).view(torch.int8) - 32, shared_scale=half(blocks, 108))


def split_q6_k(blocks: Tensor) -> Parts:
    """Nibbles, two upper bits a value, sixteen signed scales."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 2, 32)
    both = torch.cat([low & 15, low >> 4], -2)  # [rows, blocks, 2, 4, 32]
    codes = grouped(both | two_bits(blocks[..., 128:192]) << 4, 16)
    scales = in_rows(blocks[..., 192:208]).view(torch.int8)
    return Parts(codes, scales, shared_scale=half(blocks, 208))


def split_iq4_xs(blocks: Tensor) -> Parts:
    """Eight scales of six bits, then places in the table."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    upper = ((blocks[..., 2:4, None] >> shifts) & 3).flatten(-2)
    by_16 = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    scales = in_rows(low | upper << 4).view(torch.int8) - 32
    return Parts(grouped(nibbles(by_16), 32), scales, shared_scale=half(blocks, 0))


SPLITS = {
    "Q4_K": split_q4_k,
    "Q5_K": split_q5_k,
    "Q2_K": split_q2_k,
    "Q3_K": split_q3_k,
    "Q6_K": split_q6_k,
    "IQ4_XS": split_iq4_xs,
}
