"""The layouts in which packed matrices lie in GPU memory, and which quant type has which; read without torch.

A row is cut into units of 32 values, and those into one or two groups that share a scale. A value is `scale · q -
minimum`, with q an integer code minus the layout's offset, or an entry of its table. Codes lie in 32-bit words: word i
of a unit holds values 4i to 4i + 3 in the low halves of its four bytes and values 16 + 4i to 16 + 4i + 3 in the high
ones, so that masks and shifts alone turn a word into words of four bytes, which meet a row of x in its natural order.

Four units make a block. In it the words of one place lie together: place i of a block holds word i of each of its four
units. That is what thread i of four needs when tensor cores multiply (PTX ISA, "Matrix Fragments for mma.m16n8k16"),
sixteen bytes in one load. Sixteen rows make a tile, and of a tile the rows of one block lie together: what a warp loads
is a kilobyte without gaps. Of scales, those of rows r and r + 8 of a tile are neighbors: one thread needs both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pocketllm.engine.weights.bits import CODEBOOK, E2M1_DOUBLED

TILE_ROWS = 16
"""Rows that lie together, as many as a tensor-core instruction takes."""
UNIT = 32
"""Values of a row whose codes share words; x has a scale for each."""
BLOCK_UNITS = 4
PER_SHARED = 256
"""Values under one scale of scales."""


class Form(IntEnum):
    """How a word holds codes."""

    NIBBLE = 0
    """eight codes of four bits: the low and the high halves of the bytes"""
    NIBBLE_1 = 1
    """the same, the fifth bits of a block's four words of one place in a word of their own"""
    NIBBLE_2 = 2
    """the same, the fifth and sixth bits of two words of one place in a word of their own"""
    BYTE = 3
    """four signed bytes; a row's first halves of units, then its second ones"""
    TABLE = 4
    """eight places in a table of 16 signed bytes: of a unit's first half in the word's low 16 bits"""


class Scales(IntEnum):
    """What is kept of a group's scale and minimum."""

    HALF = 0
    """a float16 scale"""
    HALVES = 1
    """a float16 scale, and a float16 minimum that is added"""
    K = 2
    """a byte each, times two float16 of each 256 values"""
    SIGNED = 3
    """a signed byte, times a float16 or float32 of each 256 values"""
    FLOAT = 4
    """a float32 scale"""


@dataclass(frozen=True)
class Layout:
    """One way to keep a matrix."""

    form: Form
    group: int
    scales: Scales
    offset: int = 0
    table: tuple[int, ...] = (0,) * 16
    """Signed bytes; with an offset none is negative, which makes look-ups cheaper."""
    shared_bytes: int = 2
    """Of one scale of scales: 4 where it is a file's divided by eight, for which float16 is too narrow."""

    @property
    def planes(self) -> int:
        """Words of a unit at one place."""
        return 2 if self.form is Form.BYTE else 1

    @property
    def high_words(self) -> int:
        """Words with upper bits, of a block's words of one place."""
        return {Form.NIBBLE_1: 1, Form.NIBBLE_2: 2}.get(self.form, 0)

    @property
    def bytes_per_element(self) -> float:
        """Memory of a value, its share of the scales included; rows are filled up to whole blocks."""
        scale = {Scales.HALF: 2, Scales.HALVES: 4, Scales.K: 2, Scales.SIGNED: 1, Scales.FLOAT: 4}[self.scales]
        shared = {Scales.K: 4, Scales.SIGNED: self.shared_bytes}.get(self.scales, 0) / PER_SHARED
        return self.planes / 2 + self.high_words / 8 + scale / self.group + shared

    @property
    def packed_table(self) -> tuple[int, ...]:
        """The table's bytes as four signed 32-bit numbers, first entry lowest."""
        return tuple(np.array(self.table, np.int8).view(np.int32).tolist())


NON_LINEAR = tuple(CODEBOOK.tolist())
IQ1 = (-7, 1, 9, -9, -1, 7) + (0,) * 10
"""8 · (grid ± 1/8) for -1, 0 and 1 of the grid; first those with plus."""
IQ2 = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)


def without_sign(table: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """An offset, and the table with it added, where that leaves seven bits."""
    offset = -min(table)
    assert max(table) + offset < 128, table
    return offset, tuple(entry + offset for entry in table)


def of_grid(group: int, table: tuple[int, ...]) -> Layout:
    """How a type is kept that picks its values from a grid."""
    offset, positive = without_sign(table)
    return Layout(Form.TABLE, group, Scales.SIGNED, offset, positive, shared_bytes=4)


LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(Form.NIBBLE, 32, Scales.HALF, offset=8),
    "Q4_1": Layout(Form.NIBBLE, 32, Scales.HALVES),
    "Q5_0": Layout(Form.NIBBLE_1, 32, Scales.HALF, offset=16),
    "Q5_1": Layout(Form.NIBBLE_1, 32, Scales.HALVES),
    "Q8_0": Layout(Form.BYTE, 32, Scales.HALF),
    "IQ4_NL": Layout(Form.TABLE, 32, Scales.HALF, table=NON_LINEAR),
    "MXFP4": Layout(Form.TABLE, 32, Scales.FLOAT, *without_sign(tuple(E2M1_DOUBLED.tolist()))),
    "Q2_K": Layout(Form.NIBBLE, 16, Scales.K),
    "Q3_K": Layout(Form.NIBBLE, 16, Scales.SIGNED, offset=4),
    "Q4_K": Layout(Form.NIBBLE, 32, Scales.K),
    "Q5_K": Layout(Form.NIBBLE_1, 32, Scales.K),
    "Q6_K": Layout(Form.NIBBLE_2, 16, Scales.SIGNED, offset=32),
    "IQ4_XS": Layout(Form.TABLE, 32, Scales.SIGNED, table=NON_LINEAR),
    "IQ1_S": of_grid(32, IQ1),
    "IQ1_M": of_grid(16, IQ1),
    "IQ2_XXS": of_grid(32, IQ2),
    "IQ2_XS": of_grid(16, IQ2),
    "IQ2_S": of_grid(16, IQ2),
    "IQ3_XXS": of_grid(32, IQ3_XXS),
    "IQ3_S": of_grid(32, IQ3_S),
    **dict.fromkeys(
        ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "PQ2_0", "PTQ1_0"), Layout(Form.NIBBLE, 32, Scales.HALF, offset=1)
    ),
}
"""By GGUF name; plain floats are kept as they are and are not here."""
PLAIN_BYTES: Mapping[str, float] = {"F32": 4.0, "F16": 2.0, "BF16": 2.0}
BYTES_PER_ELEMENT = {**PLAIN_BYTES, **{name: layout.bytes_per_element for name, layout in LAYOUTS.items()}}
