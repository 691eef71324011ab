"""Types that pick several values at once from a grid: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

A grid's numbers are few: with signs, or with the shift of the IQ1 types, 16 at most. Each value is kept as its place
among them, four bits; what a file packs tighter than that is unpacked at load. Source of the block formats: the public
ggml format; the decoders in `weights/quant` say each in words.
"""

from functools import cache

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import LAYOUTS
from pocketllm.engine.backends.cuda.packing import Parts
from pocketllm.engine.backends.cuda.quant.blocks_32 import half
from pocketllm.engine.backends.cuda.quant.super_blocks import grouped, in_rows
from pocketllm.engine.weights.bits import EVEN_SIGNS, SIGNS, grid

NEGATIVE = 8
"""Added to a place for the same number with the other sign."""
SHIFTED_DOWN = 3
"""Added to the place of a grid's number - 1/8 where that + 1/8 is without."""


@cache
def places_of_grid(name: str, quant_type: str, device: torch.device) -> Tensor:
    """The points of a grid as places in a type's table, uint8 [points, values]."""
    points = torch.from_numpy(grid(name)).to(torch.int32)
    if quant_type.startswith("IQ1"):
        return (points + 1).to(torch.uint8).to(device)
    layout = LAYOUTS[quant_type]
    table = torch.tensor(layout.table[:NEGATIVE], dtype=torch.int32) - layout.offset
    return (points[..., None] == table).to(torch.uint8).argmax(-1).to(torch.uint8).to(device)


@cache
def sign_places(is_even: bool, device: torch.device) -> Tensor:
    """What signs add to places, uint8 [codes of signs, 8]."""
    signs = torch.from_numpy(EVEN_SIGNS if is_even else SIGNS)
    return (signs < 0).to(torch.uint8).to(device) * NEGATIVE


def words_of(blocks: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Little-endian words in bytes of every block, as int64 without a sign."""
    words = blocks[..., first:last].contiguous().view(dtype).to(torch.int64)
    return words & ((1 << (8 * dtype.itemsize)) - 1)


def bits_of(values: Tensor, width: int, count: int) -> Tensor:
    """`count` fields of `width` bits of each value, lowest first: [..., count]."""
    shifts = torch.arange(0, width * count, width, device=values.device)
    return (values[..., None] >> shifts) & ((1 << width) - 1)


def signed_parts(codes: Tensor, group: int, scales: Tensor, shared: Tensor) -> Parts:
    """Places [rows, blocks, …], scales of groups by 2 · scale + 1, and what those are multiplied by."""
    return Parts(grouped(codes, group), in_rows(2 * scales + 1).to(torch.int8), shared_scale=shared)


def split_iq2_xxs(blocks: Tensor) -> Parts:
    """For each 32 values four picks, then a word: four times seven bits of signs, and the scale."""
    by_32 = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    words = words_of(by_32, 4, 8, torch.int32)[..., 0]
    points = places_of_grid("IQ2_XXS", "IQ2_XXS", blocks.device)[by_32[..., :4].long()]
    signs = sign_places(True, blocks.device)[bits_of(words, 7, 4)]
    return signed_parts(points + signs, 32, words >> 28, half(blocks, 0).float() / 8)


def split_iq2_xs(blocks: Tensor) -> Parts:
    """A word for each eight values: nine bits of the pick, seven of signs; then scales of 16."""
    words = words_of(blocks, 2, 66, torch.int16)
    codes = (
        places_of_grid("IQ2_XS", "IQ2_XS", blocks.device)[words & 511] + sign_places(True, blocks.device)[words >> 9]
    )
    return signed_parts(codes, 16, bits_of(blocks[..., 66:].long(), 4, 2), half(blocks, 0).float() / 8)


def split_iq2_s(blocks: Tensor) -> Parts:
    """Low bits of the picks, signs, upper bits of the picks, scales of 16."""
    upper = bits_of(blocks[..., 66:74].long(), 2, 4).flatten(-2)
    points = places_of_grid("IQ2_S", "IQ2_S", blocks.device)[blocks[..., 2:34].long() | upper << 8]
    codes = points + sign_places(False, blocks.device)[blocks[..., 34:66].long()]
    return signed_parts(codes, 16, bits_of(blocks[..., 74:].long(), 4, 2), half(blocks, 0).float() / 8)


def split_iq3_xxs(blocks: Tensor) -> Parts:
    """Picks of four values; then for each 32 values a word: four times seven bits of signs, and the scale."""
    words = words_of(blocks, 66, 98, torch.int32)
    points = places_of_grid("IQ3_XXS", "IQ3_XXS", blocks.device)[blocks[..., 2:66].long()]
    signs = sign_places(True, blocks.device)[bits_of(words, 7, 4)]
    return signed_parts(points.reshape(signs.shape) + signs, 32, words >> 28, half(blocks, 0).float() / 4)


def split_iq3_s(blocks: Tensor) -> Parts:
    """Low bits of the picks of four values, their ninth bits, signs, scales of 32."""
    ninth = bits_of(blocks[..., 66:74].long(), 1, 8).flatten(-2)
    points = places_of_grid("IQ3_S", "IQ3_S", blocks.device)[blocks[..., 2:66].long() | ninth << 8]
    signs = sign_places(False, blocks.device)[blocks[..., 74:106].long()]
    return signed_parts(
        points.reshape(signs.shape) + signs, 32, bits_of(blocks[..., 106:].long(), 4, 2), half(blocks, 0).float()
    )


def split_iq1_s(blocks: Tensor) -> Parts:
    """Low bits of the picks; then for each 32 values a word: upper bits of four picks, the scale, the shift's sign."""
    words = words_of(blocks, 34, 50, torch.int16)
    picks = blocks[..., 2:34].long().reshape(*words.shape, 4) | bits_of(words, 3, 4) << 8
    down = ((words >> 15) * SHIFTED_DOWN).to(torch.uint8)
    codes = places_of_grid("IQ1_S", "IQ1_S", blocks.device)[picks] + down[..., None, None]
    return signed_parts(codes, 32, words >> 12 & 7, half(blocks, 0).float() / 8)


def split_iq1_m(blocks: Tensor) -> Parts:
    """Low bits of the picks; a nibble for each: upper bits, the shift's sign; words of four scales and a part of d."""
    words = words_of(blocks, 48, 56, torch.int16)
    nibbles = bits_of(blocks[..., 32:48].long(), 4, 2).flatten(-2)
    picks = blocks[..., :32].long() | (nibbles & 7) << 8
    down = ((nibbles >> 3) * SHIFTED_DOWN).to(torch.uint8)
    codes = places_of_grid("IQ1_S", "IQ1_M", blocks.device)[picks] + down[..., None]
    shifts = torch.arange(0, 16, 4, device=blocks.device)
    scale = ((words >> 12) << shifts).sum(-1).to(torch.int16).view(torch.float16)
    return signed_parts(codes, 16, bits_of(words, 3, 4), scale.float() / 8)


SPLITS = {
    "IQ1_S": split_iq1_s,
    "IQ1_M": split_iq1_m,
    "IQ2_XXS": split_iq2_xxs,
    "IQ2_XS": split_iq2_xs,
    "IQ2_S": split_iq2_s,
    "IQ3_XXS": split_iq3_xxs,
    "IQ3_S": split_iq3_s,
}
