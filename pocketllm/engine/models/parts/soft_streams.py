"""Parallel residual streams that a softmax balances: how deepseek4 and glm5-next connect the halves of a layer.

Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880), as DeepSeek V4 computes it.
"""

from dataclasses import dataclass

from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.header import HeaderReader

SOFT_STREAM_OPS = frozenset({"open_streams", "read_soft_streams", "write_streams"})


@dataclass(frozen=True)
class SoftStreams:
    """How many streams there are, and how they are balanced."""

    count: int
    iterations: int
    eps: float

    def shapes(self, hidden: int) -> Shapes:
        """Tensors of a layer by the last parts of their names."""
        shares = self.count * (2 + self.count)
        names: Shapes = {}
        for half in ("attn", "ffn"):
            names |= {
                f"hc_{half}_fn.weight": (shares, self.count * hidden),
                f"hc_{half}_base.weight": (shares,),
                f"hc_{half}_scale.weight": (3,),
            }
        return names


def read_soft_streams(header: HeaderReader) -> SoftStreams:
    """`hyper_connection.*` keys; what cannot be read becomes one of the header's problems."""
    return SoftStreams(
        count=header.count("hyper_connection.count"),
        iterations=header.count("hyper_connection.sinkhorn_iterations"),
        eps=header.positive("hyper_connection.epsilon"),
    )


def bind_connection(bind: Binder, name: str, streams: SoftStreams) -> SoftConnection:
    """How a half of a layer such as `blk.0.hc_attn` is connected."""
    return SoftConnection(
        weight=bind.projection(f"{name}_fn"),
        scale=bind.vector(f"{name}_scale.weight"),
        base=bind.vector(f"{name}_base.weight"),
        num_streams=streams.count,
        iterations=streams.iterations,
        eps=streams.eps,
        norm_eps=bind.eps,
    )
