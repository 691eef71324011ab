"""What layers that compress groups of tokens ask of a backend: geometry and small weights (DeepSeek-AI 2026, V4)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Compressor:
    """How every `ratio` tokens become one entry of `dim` values.

    A token gives values and gates. An entry is the sum of its tokens' values weighed by a softmax, over the tokens, of
    gate + position, for each of the `dim` places by itself; then normed, and its last places rotated as neighbors at
    the group's first token, where there is a norm and are frequencies. Where groups overlap, a token has two of each:
    the first for the entry of the group after its own, the second for its own group's, so that an entry is a sum over
    2 · ratio tokens, but the first one.
    """

    ratio: int
    dim: int
    overlaps: bool
    position: Any
    """[ratio, width] added to the gates of a group's tokens."""
    norm: Any | None = None
    """`ops.Norm` of an entry."""
    inv_freq: Any | None = None
    """As `rope_angles` takes it."""

    @property
    def width(self) -> int:
        """Values, and gates, of a token."""
        return self.dim * (2 if self.overlaps else 1)


@dataclass(frozen=True)
class WindowSpec:
    """Geometry of attention over the latest `window` tokens and over entries; one row is key and value of all heads."""

    num_heads: int
    dim: int
    window: int
    scale: float


@dataclass(frozen=True)
class SoftConnection:
    """How a sublayer reads and writes parallel residual streams: `streams.HyperConnection`, as DeepSeek V4 has it.

    Reading shares get `eps` on top; mixing begins as a softmax over each row plus `eps`, whose columns are divided by
    their sum + eps, then rows and columns in turn, and stream `to` takes mixing[from, to]: the transpose.
    """

    weight: Any
    """`ops.Projection` [2n + n·n, n · hidden]; of the head [n, n · hidden], which reads and does not write."""
    scale: Any
    """[3], of the head [1]"""
    base: Any
    num_streams: int
    iterations: int
    """0 for the head."""
    eps: float
    norm_eps: float


@dataclass(frozen=True)
class LimitedExperts:
    """Experts whose gate is at most `limit` and whose other half lies within ±limit, before silu(gate) · up.

    routes: [vocab, num_used] the experts of each token id, which only its scores weigh; None: those of the highest
    score + bias.
    """

    experts: Any
    """`mixture.Experts`, all of them one group."""
    limit: float
    routes: npt.NDArray[np.int32] | None = None
