"""Types of three values or fewer under one scale: TQ1_0, TQ2_0, Q1_0, Q2_0, PQ2_0, PTQ1_0.

Source of the block formats: the public ggml format; the decoders in `weights/quant` say each in words. A code is the
value's sign and 1; a block's scale is repeated for each 32 values.
"""

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.packing import Parts
from pocketllm.engine.backends.cuda.quant.blocks_32 import half
from pocketllm.engine.weights.quant import ptq1_0, tq1_0

GROUP = 32


def parts(codes: Tensor, scale: Tensor) -> Parts:
    """codes: [rows, blocks, values]; scale: [rows, blocks]."""
    groups = codes.reshape(len(codes), -1, GROUP)
    return Parts(groups, scale.repeat_interleave(codes.shape[-1] // GROUP, 1))


def trits(packed: Tensor, digits: int) -> Tensor:
    """Digits 0 to 2 of the base-3 fractions that bytes hold, the first ones of all bytes first."""
    some = [((packed.int() * 3**digit & 255) * 3 >> 8).to(torch.uint8) for digit in range(digits)]
    return torch.cat(some, -1)


def split_tq1_0(blocks: Tensor) -> Parts:
    """Three sections of base-3 digits, then the scale."""
    return parts(torch.cat([trits(blocks[..., a:b], n) for a, b, n in tq1_0.SECTIONS], -1), half(blocks, 52))


def split_ptq1_0(blocks: Tensor) -> Parts:
    """The same of half as many."""
    return parts(torch.cat([trits(blocks[..., a:b], n) for a, b, n in ptq1_0.SECTIONS], -1), half(blocks, 26))


def split_tq2_0(blocks: Tensor) -> Parts:
    """Each 32 bytes hold 128 values, two bits each, lowest first; then the scale."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    quants = (blocks[..., :64].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts) & 3
    return parts(quants.flatten(-3), half(blocks, 64))


def split_q2_0(blocks: Tensor) -> Parts:
    """The scale, then four neighbors in a byte; PQ2_0 looks the same."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    return parts(((blocks[..., 2:, None] >> shifts) & 3).flatten(-2), half(blocks, 0))


def split_q1_0(blocks: Tensor) -> Parts:
    """The scale, then a bit for each value: 1 or -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return parts((((blocks[..., 2:, None] >> shifts) & 1) << 1).flatten(-2), half(blocks, 0))


SPLITS = {
    "TQ1_0": split_tq1_0,
    "TQ2_0": split_tq2_0,
    "Q1_0": split_q1_0,
    "Q2_0": split_q2_0,
    "PQ2_0": split_q2_0,
    "PTQ1_0": split_ptq1_0,
}
