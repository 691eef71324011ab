"""Types with one scale for each 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.

Source of the block formats: the public ggml format; the decoders in `weights/quant` say each in words.
"""

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.packing import Parts


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of 16 bytes, then their high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def fifth_bits(packed: Tensor) -> Tensor:
    """32 bits of four bytes, each as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(-2)


def split_q4_0(blocks: Tensor) -> Parts:
    """Scale, then nibbles; IQ4_NL looks the same."""
    return Parts(nibbles(blocks[..., 2:]), half(blocks, 0))


def split_q4_1(blocks: Tensor) -> Parts:
    """Scale, minimum, nibbles."""
    return Parts(nibbles(blocks[..., 4:]), half(blocks, 0), half(blocks, 2))


def split_q5_0(blocks: Tensor) -> Parts:
    """Scale, fifth bits, nibbles."""
    return Parts(nibbles(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6]), half(blocks, 0))


def split_q5_1(blocks: Tensor) -> Parts:
    """Scale, minimum, fifth bits, nibbles."""
    return Parts(nibbles(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8]), half(blocks, 0), half(blocks, 2))


def split_q8_0(blocks: Tensor) -> Parts:
    """Scale, then bytes."""
    return Parts(blocks[..., 2:].contiguous(), half(blocks, 0))


def split_mxfp4(blocks: Tensor) -> Parts:
    """The scale 2^(e - 128) goes below what float16 holds."""
    exponent = blocks[..., 0].to(torch.int32) - 128
    return Parts(nibbles(blocks[..., 1:]), torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent))


SPLITS = {
    "Q4_0": split_q4_0,
    "Q4_1": split_q4_1,
    "Q5_0": split_q5_0,
    "Q5_1": split_q5_1,
    "Q8_0": split_q8_0,
    "IQ4_NL": split_q4_0,
    "MXFP4": split_mxfp4,
}
