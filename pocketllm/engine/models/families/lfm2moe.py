"""lfm2moe: lfm2's layers, with a mixture of experts for the feed-forward of all but the first few.

Liquid AI 2025, "LFM2 Technical Report" (arXiv 2511.23404). Experts are chosen by sigmoid scores and a bias, and weighed
by the scores alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    context_length,
    dense_unmet,
    gated_matrices,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, FeedForward, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.hybrid import HybridModel
from pocketllm.engine.models.parts.mixtures.experts import (
    MIXTURE_OPS,
    MixtureShape,
    bind_mixture,
    mixture_shapes,
    read_mixture,
)
from pocketllm.engine.models.parts.short_conv import (
    SHORT_CONV_OPS,
    ShortConvShape,
    bind_short_conv_model,
    read_short_conv_shape,
    short_conv_shapes,
)

ARCHITECTURE = "lfm2moe"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {"expert_shared_count": 0}


@dataclass(frozen=True)
class Lfm2MoeShape:
    """The layers' sizes, those of the experts, and how many layers have none."""

    layers: ShortConvShape
    experts: MixtureShape
    num_dense: int


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Lfm2MoeShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    layers = read_short_conv_shape(header, vocab_size)
    return Lfm2MoeShape(
        layers=layers,
        experts=read_mixture(header, layers.dense.hidden, gating=2, normalized=True),
        num_dense=header.count_or_none("leading_dense_block_count"),
    )


def tensor_shapes(shape: Lfm2MoeShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    experts, bias = mixture_shapes(shape.experts)
    matrices: Shapes = {name.removesuffix(".weight"): rows for name, rows in experts.items()}
    gated = gated_matrices(shape.layers.dense)
    needed, optional = short_conv_shapes(shape.layers, lambda number: gated if number < shape.num_dense else matrices)
    for number in range(shape.num_dense, shape.layers.dense.num_layers):
        optional |= {f"blk.{number}.{name}": rows for name, rows in bias.items()}
    return needed, optional


class Lfm2MoeFamily:
    """How an lfm2moe header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=SHORT_CONV_OPS | MIXTURE_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).layers.cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.layers.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> HybridModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.layers.dense.eps)

        def bind_feed_forward(number: int) -> FeedForward:
            block = f"blk.{number}."
            return bind.swiglu(block) if number < shape.num_dense else bind_mixture(bind, block, shape.experts)

        return bind_short_conv_model(bind, shape.layers, bind_feed_forward)


FAMILY = Lfm2MoeFamily()
