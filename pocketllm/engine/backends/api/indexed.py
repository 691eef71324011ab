"""What an index over groups of keys, and rows of hashed n-grams, ask of a backend: geometry and small weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupIndex:
    """Which tokens a query attends: those of the `num_best` best groups of `ratio`, and those after the last whole one.

    Each token has an index key of `dim` values. A group's key is their mean, normed and rotated at its first token; a
    group is worth Σ max(index query · key, 0) over `num_heads` index queries, and of equal ones the earlier is taken.
    """

    num_heads: int
    dim: int
    ratio: int
    num_best: int
    norm: Any
    """`ops.Norm` of a group's key."""
    inv_freq: Any
    """As `rope_angles` takes it; halves rotate."""


@dataclass(frozen=True)
class NGrams:
    """How a token and those before it become rows of a table, in 64-bit integers that wrap.

    For 2, 3, … tokens: the XOR of each token · its multiplier, modulo a head's size, plus the head's offset. Before a
    sequence, and before an end-of-text token, every token counts as end-of-text.
    """

    multipliers: Sequence[int]
    """One for each token, the latest first."""
    heads_per_length: int
    """Heads for 2 tokens come first."""
    sizes: Sequence[int]
    """One for each head, as are the offsets."""
    offsets: Sequence[int]
    end_token: int
