"""What layers with parallel residual streams ask of a backend."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HyperConnection:
    """How one sublayer reads parallel residual streams and writes to them, from a token's own streams.

    Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880), after Zhu et al. 2024 (arXiv
    2409.19606). With n streams: w = weight · (flat / rms(flat)), split into n, n and n · n, gives

    - reading shares sigmoid(w · scale[0] + base);
    - writing shares 2 · sigmoid(w · scale[1] + base);
    - mixing[to, from]: exp of w · scale[2] + base, clamped to ±clamp, less each row's maximum; then `iterations` times
      rows divided by their sum + eps, columns divided by theirs + eps (Sinkhorn & Knopp 1967).
    """

    weight: Any
    """`ops.Projection` [2n + n·n, n · hidden]"""
    scale: Any
    """[3]"""
    base: Any
    """[2n + n·n]"""
    num_streams: int
    iterations: int
    eps: float
    norm_eps: float
    clamp: float
