"""Parallel residual streams that gates of low rank read and write, in place of norms and of the residual.

After Zhu et al. 2024, "Hyper-Connections" (arXiv 2409.19606); here every value of every stream has a gate when a half
of a layer reads, and every stream has one when it is written.
"""

from dataclasses import dataclass

import numpy as np

from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes

GATED_STREAMS_OPS = frozenset({"open_streams", "mean_streams", "add_gated", "sigmoid_mul", "mul", "scale"})


def stream_shapes(num_streams: int, hidden: int, low_rank: int) -> tuple[Shapes, Shapes]:
    """What reads the streams, and what a half of a layer has beside, by the last part of a tensor's name."""
    wide = num_streams * hidden
    reading: Shapes = {"norm.weight": (wide,), "down.weight": (low_rank, wide), "up.weight": (wide, low_rank)}
    return reading, {"inject.weight": (num_streams, wide)}


@dataclass(frozen=True)
class StreamNorm:
    """An RMS norm of each stream, with weights for all of them."""

    each: Norm
    """Its weight is 1 everywhere: [hidden]."""
    weight: Tensor
    """[streams * hidden]"""

    def of(self, streams: Tensor, ops: Ops) -> Tensor:
        """[tokens, streams * hidden] → the same."""
        return ops.mul(ops.rms_norm(streams, self.each), self.weight)


@dataclass(frozen=True)
class StreamReader:
    """What is read of the streams: mean over them of sigmoid(up(silu(down n / streams))) · n, with n normed."""

    norm: StreamNorm
    down: Projection
    up: Projection
    num_streams: int

    def read(self, streams: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """That, [tokens, hidden], and n."""
        normed = self.norm.of(streams, ops)
        narrow = ops.scale(ops.project(normed, self.down)[0], 1 / self.num_streams)
        [weights] = ops.project(ops.sigmoid_mul(narrow, narrow), self.up)
        return ops.mean_streams(ops.sigmoid_mul(weights, normed), self.num_streams), normed


@dataclass(frozen=True)
class Gates:
    """Around a half of a layer: what it reads, and how much of what it gives each stream takes."""

    reader: StreamReader
    inject: Projection

    def read(self, streams: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """What the half reads, and the gates for `Ops.add_gated`."""
        mixed, normed = self.reader.read(streams, ops)
        return mixed, ops.scale(ops.project(normed, self.inject)[0], 1 / self.reader.num_streams)


def bind_stream_norm(bind: Binder, name: str, hidden: int) -> StreamNorm:
    """A norm of each stream by its name without `.weight`."""
    ones = bind.ops.load_vector(np.ones(hidden, np.float32))
    return StreamNorm(Norm(ones, bind.eps), bind.vector(f"{name}.weight"))


def bind_reader(bind: Binder, prefix: str, num_streams: int, hidden: int) -> StreamReader:
    """What reads the streams; prefix: such as `output_hc_`."""
    return StreamReader(
        norm=bind_stream_norm(bind, f"{prefix}norm", hidden),
        down=bind.projection(f"{prefix}down"),
        up=bind.projection(f"{prefix}up"),
        num_streams=num_streams,
    )


def bind_gates(bind: Binder, prefix: str, num_streams: int, hidden: int) -> Gates:
    """What is around a half of a layer; prefix: such as `blk.0.hc_attn_`."""
    return Gates(bind_reader(bind, prefix, num_streams, hidden), bind.projection(f"{prefix}inject"))
