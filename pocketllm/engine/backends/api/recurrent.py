"""What recurrent layers ask of a backend: the geometry and the small weights of a delta rule."""

from dataclasses import dataclass
from typing import Any

UNIT_EPS = 1e-6
"""Beside the sum of squares when queries and keys are brought to length one."""


@dataclass(frozen=True)
class DeltaNet:
    """One Gated DeltaNet layer (Yang et al. 2024, arXiv 2412.06464), its convolution and projections aside."""

    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool
    """Value head j reads key head j mod num_key_heads; otherwise neighbors share one, as in grouped attention."""
    rate: Any
    """[num_value_heads] -exp(A_log), below zero."""
    time_bias: Any
    """[num_value_heads] added to the time step's logits before their softplus."""


@dataclass(frozen=True)
class KimiDelta:
    """One layer of Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692), convolutions aside.

    The gated delta rule with a decay of its own for each value of a key.
    """

    num_heads: int
    """Of queries, keys and values alike."""
    dim: int
    """Of each."""
    rate: Any
    """[num_heads] -exp(A_log), below zero."""
    time_bias: Any
    """[num_heads * dim] added to the time step's logits."""
    lower_bound: float | None
    """Below zero: what the logarithm of a decay never reaches; None: it has no bound."""
