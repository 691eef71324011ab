"""Codes and scales brought into their layout, and back, by torch on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pocketllm.engine.backends.cuda.layouts import BLOCK_UNITS, PER_SHARED, TILE_ROWS, UNIT, Form, Layout, Scales


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
    """A matrix [rows, cols] in a layout; rows are filled up to whole tiles of TILE_ROWS, columns to whole blocks."""

    layout: Layout
    rows: int
    cols: int
    words: Tensor
    """int32 [tiles, blocks, planes, TILE_ROWS, 16]: of a row place by place, each for the block's units"""
    high: Tensor
    """int32 [tiles, blocks, TILE_ROWS, 4 · high words], or one number where the layout has none"""
    scales: Tensor
    """[tiles, groups, TILE_ROWS], rows in the order of `tiled`; its dtype is the layout's"""
    shared: Tensor
    """[tiles, 256s, TILE_ROWS], or one number where the layout has none"""

    @property
    def units(self) -> int:
        """Units of a row."""
        return units_of(self.cols)


def units_of(cols: int) -> int:
    """Units that a row of so many values takes, whole blocks."""
    return -(-cols // (UNIT * BLOCK_UNITS)) * BLOCK_UNITS


def pack(parts: Parts, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words, high bits, scales and shared scales of whole tiles of rows."""
    rows, groups, _ = parts.codes.shape
    units = units_of(groups * layout.group)
    flat = filled(parts.codes.reshape(rows, -1), units * UNIT)
    codes = flat.view(rows, -1, BLOCK_UNITS, 2, 4, 4).to(torch.int32)  # [rows, blocks, unit, half, place, byte]
    unit, half, byte = places(codes.device)
    low = codes if layout.form is Form.BYTE else codes & 15
    if layout.form is Form.BYTE:
        words = (low << (8 * byte)).sum(-1, dtype=torch.int32).permute(0, 1, 3, 4, 2)
    else:
        words = (low << four_bits(layout.form, half, byte)).sum((3, 5), dtype=torch.int32).transpose(2, 3)
    words = words.reshape(rows // TILE_ROWS, TILE_ROWS, units // BLOCK_UNITS, layout.planes, 16).permute(0, 2, 3, 1, 4)
    high = torch.zeros(1, dtype=torch.int32, device=codes.device)
    if layout.form is Form.NIBBLE_1:
        high = ((codes >> 4) << (2 * unit + half + 8 * byte)).sum((2, 3, 5), dtype=torch.int32)
    elif layout.form is Form.NIBBLE_2:
        bits = (codes >> 4) << (4 * (unit % 2) + 2 * half + 8 * byte)
        high = bits.view(rows, -1, 2, 2, 2, 4, 4).sum((3, 4, 6), dtype=torch.int32).transpose(2, 3)
    if high.ndim > 1:
        high = high.reshape(rows // TILE_ROWS, TILE_ROWS, units // BLOCK_UNITS, -1).transpose(1, 2).contiguous()
    scales, shared = pack_scales(parts, layout.scales)
    scales = tiled(filled(scales, units * UNIT // layout.group))
    if shared.ndim > 1:
        shared = tiled(filled(shared, -(-units * UNIT // PER_SHARED)))
    return words.contiguous(), high, scales, shared


def places(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number of the unit, half and byte of each value of a block, [units, halves, places, bytes] by broadcast."""
    unit = torch.arange(BLOCK_UNITS, dtype=torch.int32, device=device)[:, None, None, None]
    half = torch.arange(2, dtype=torch.int32, device=device)[:, None, None]
    return unit, half, torch.arange(4, dtype=torch.int32, device=device)


def four_bits(form: Form, half: Tensor, byte: Tensor) -> Tensor:
    """Where in its word a value's low bits are: places in a table lie as one look-up wants them."""
    return 16 * half + 4 * byte if form is Form.TABLE else 4 * half + 8 * byte


def filled(values: Tensor, width: int) -> Tensor:
    """[rows, n] → [rows, width], zeros after what is there."""
    lacking = width - values.shape[1]
    return values if lacking == 0 else torch.cat([values, values.new_zeros(len(values), lacking)], 1)


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
    """[rows, n] → [tiles, n, TILE_ROWS]; of a tile's rows 0, 8, 1, 9, …"""
    by_half = values.view(-1, 2, TILE_ROWS // 2, values.shape[1])
    return by_half.permute(0, 3, 2, 1).reshape(len(by_half), -1, TILE_ROWS).contiguous()


def untiled(values: Tensor) -> Tensor:
    """The way back."""
    return values.view(*values.shape[:2], TILE_ROWS // 2, 2).permute(0, 3, 2, 1).reshape(-1, values.shape[1])


def unpack(packed: Packed) -> Tensor:
    """The matrix's values, float32 [rows, cols]: what every kernel computes with, spelled out."""
    layout = packed.layout
    codes = codes_of(packed)
    if layout.form is Form.TABLE:
        codes = torch.tensor(layout.table, device=codes.device)[codes]
    codes = codes.reshape(len(codes), -1, layout.group) - layout.offset
    scale, minimum = group_scales(packed)
    values = codes.float() * scale[..., None]
    if minimum is not None:
        values -= minimum[..., None]
    return values.reshape(len(codes), -1)[: packed.rows, : packed.cols]


def codes_of(packed: Packed) -> Tensor:
    """Codes as they were packed, int32 [padded rows, padded columns]."""
    form, rows = packed.layout.form, len(packed.words) * TILE_ROWS
    unit, half, byte = places(packed.words.device)
    words = packed.words.permute(0, 3, 1, 2, 4).reshape(rows, -1, packed.layout.planes, 4, BLOCK_UNITS)
    if form is Form.BYTE:
        words = words.permute(0, 1, 4, 2, 3)[..., None]
        return ((((words >> (8 * byte)) & 255) ^ 128) - 128).reshape(rows, -1)
    words = words[:, :, 0].transpose(2, 3)[:, :, :, None, :, None]
    codes = (words >> four_bits(form, half, byte)) & 15
    if packed.high.ndim > 1:
        high = packed.high.transpose(1, 2).reshape(rows, -1, 4, packed.layout.high_words)
        if form is Form.NIBBLE_1:
            codes = codes | ((high.view(rows, -1, 1, 1, 4, 1) >> (2 * unit + half + 8 * byte)) & 1) << 4
        else:
            high = high.transpose(2, 3).repeat_interleave(2, 2)[:, :, :, None, :, None]
            codes = codes | ((high >> (4 * (unit % 2) + 2 * half + 8 * byte)) & 3) << 4
    return codes.reshape(rows, -1)


def group_scales(packed: Packed) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of every group, float32 [padded rows, groups]."""
    scales, groups = untiled(packed.scales), packed.scales.shape[1]
    each = PER_SHARED // packed.layout.group
    match packed.layout.scales:
        case Scales.HALVES:
            both = scales.reshape(-1).view(torch.float16).view(len(scales), groups, 2).float()
            return both[..., 0], -both[..., 1]
        case Scales.K:
            both = scales.reshape(-1).view(torch.uint8).view(len(scales), groups, 2).float()
            shared = untiled(packed.shared).reshape(-1).view(torch.float16).view(len(scales), -1, 2).float()
            product = both * shared.repeat_interleave(each, 1)[:, :groups]
            return product[..., 0], product[..., 1]
        case Scales.SIGNED:
            shared = untiled(packed.shared).float()
            return scales.float() * shared.repeat_interleave(each, 1)[:, :groups], None
        case _:
            return scales.float(), None
