"""Codes and scales brought into their layout, and back, by torch on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import TILE_ROWS, Form, Layout, Scales


@dataclass
class Parts:
    """Rows taken apart. codes: uint8 [rows, groups, group], a signed byte as its bits; scale and minimum: [rows,
    groups] as the layout keeps them, `shared_*`: [rows, 256s] float16."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    shared_scale: Tensor | None = None
    shared_minimum: Tensor | None = None


@dataclass
class Packed:
    """A matrix [rows, cols] in a layout; its rows padded to whole tiles of TILE_ROWS."""

    layout: Layout
    rows: int
    cols: int
    words: Tensor
    """int32 [padded rows, groups, words]"""
    high: Tensor
    """int32 [padded rows, groups], or one number where the layout has none"""
    scales: Tensor
    """[tiles, groups, TILE_ROWS]; its dtype is the layout's"""
    shared: Tensor
    """[tiles, 256s, TILE_ROWS], or one number where the layout has none"""


def pack(parts: Parts, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words, high bits, scales and shared scales of whole tiles of rows."""
    rows, groups, _ = parts.codes.shape
    codes = parts.codes.view(rows, groups, layout.parts, layout.words, 4).to(torch.int32)
    part, word, byte = places(layout, codes.device)
    high = torch.zeros(1, dtype=torch.int32, device=codes.device)
    low = codes if layout.form is Form.BYTE else codes & 15
    words = (low << (4 * part + 8 * byte)).sum((2, 4), dtype=torch.int32)
    if layout.form is Form.NIBBLE_1:
        high = ((codes >> 4) << (2 * word + part + 8 * byte)).sum((2, 3, 4), dtype=torch.int32)
    elif layout.form is Form.NIBBLE_2:
        high = ((codes >> 4) << (4 * word + 2 * part + 8 * byte)).sum((2, 3, 4), dtype=torch.int32)
    scales, shared = pack_scales(parts, layout.scales)
    return words, high, tiled(scales), shared if shared.ndim == 1 else tiled(shared)


def places(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number of the part, word and byte of each value of a group, [parts, words, 4] by broadcast."""
    part = torch.arange(layout.parts, dtype=torch.int32, device=device)[:, None, None]
    word = torch.arange(layout.words, dtype=torch.int32, device=device)[:, None]
    return part, word, torch.arange(4, dtype=torch.int32, device=device)


def pack_scales(parts: Parts, kind: Scales) -> tuple[Tensor, Tensor]:
    """A group's scale and minimum in one number, and those of 256 values in another."""
    nothing = torch.zeros(1, dtype=torch.int32, device=parts.codes.device)
    match kind:
        case Scales.HALVES:
            assert parts.minimum is not None
            return side_by_side(parts.scale, parts.minimum), nothing
        case Scales.K:
            assert parts.minimum is not None
            assert parts.shared_scale is not None
            assert parts.shared_minimum is not None
            both = torch.stack([parts.scale, parts.minimum], -1).contiguous().view(torch.int16).squeeze(-1)
            return both, side_by_side(parts.shared_scale, parts.shared_minimum)
        case Scales.SIGNED:
            assert parts.shared_scale is not None
            return parts.scale, parts.shared_scale
        case _:
            return parts.scale, nothing


def side_by_side(low: Tensor, high: Tensor) -> Tensor:
    """Two float16 in one int32."""
    return torch.stack([low, high], -1).contiguous().view(torch.int32).squeeze(-1)


def tiled(values: Tensor) -> Tensor:
    """[rows, n] → [tiles, n, TILE_ROWS]."""
    return values.view(-1, TILE_ROWS, values.shape[1]).transpose(1, 2).contiguous()


def untiled(values: Tensor) -> Tensor:
    """The way back."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def unpack(packed: Packed) -> Tensor:
    """The matrix's values, float32 [rows, cols]: what every kernel computes with, spelled out."""
    layout = packed.layout
    part, word, byte = places(layout, packed.words.device)
    words = packed.words[:, :, None, :, None]
    high = packed.high[..., None, None, None] if packed.high.ndim > 1 else packed.high
    codes = (words >> (4 * part + 8 * byte)) & (255 if layout.form is Form.BYTE else 15)
    if layout.form is Form.BYTE:
        codes = (codes ^ 128) - 128
    elif layout.form is Form.NIBBLE_1:
        codes |= ((high >> (2 * word + part + 8 * byte)) & 1) << 4
    elif layout.form is Form.NIBBLE_2:
        codes |= ((high >> (4 * word + 2 * part + 8 * byte)) & 3) << 4
    elif layout.form is Form.TABLE:
        codes = torch.tensor(layout.table, device=codes.device)[codes]
    codes = codes.reshape(*packed.words.shape[:2], layout.group) - layout.offset
    scale, minimum = group_scales(packed)
    values = codes.float() * scale[..., None]
    if minimum is not None:
        values -= minimum[..., None]
    return values.reshape(len(packed.words), -1)[: packed.rows]


def group_scales(packed: Packed) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of every group, float32 [padded rows, groups]."""
    scales, groups = untiled(packed.scales), packed.scales.shape[1]
    match packed.layout.scales:
        case Scales.HALVES:
            both = scales.reshape(-1).view(torch.float16).view(len(scales), groups, 2).float()
            return both[..., 0], -both[..., 1]
        case Scales.K:
            both = scales.reshape(-1).view(torch.uint8).view(len(scales), groups, 2).float()
            shared = untiled(packed.shared).reshape(-1).view(torch.float16).view(len(scales), -1, 2).float()
            shared = shared.repeat_interleave(groups // shared.shape[1], 1)
            product = both * shared
            return product[..., 0], product[..., 1]
        case Scales.SIGNED:
            shared = untiled(packed.shared).float()
            return scales.float() * shared.repeat_interleave(groups // shared.shape[1], 1), None
        case _:
            return scales.float(), None
