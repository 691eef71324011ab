"""lfm2: gated short convolutions with attention in some layers, and a gated feed-forward in every one.

Liquid AI 2025, "LFM2 Technical Report" (arXiv 2511.23404). The norm before the head is called `token_embd_norm`.
"""

from collections.abc import Mapping, Sequence
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
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.hybrid import HybridModel
from pocketllm.engine.models.parts.short_conv import (
    SHORT_CONV_OPS,
    ShortConvShape,
    bind_short_conv_model,
    read_short_conv_shape,
    short_conv_shapes,
)

ARCHITECTURE = "lfm2"


def read_shape(header: HeaderReader, vocab_size: int = 0) -> ShortConvShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    return read_short_conv_shape(header, vocab_size)


def tensor_shapes(shape: ShortConvShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    return short_conv_shapes(shape, lambda number: gated_matrices(shape.dense))


class Lfm2Family:
    """How an lfm2 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=SHORT_CONV_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.dense, NEUTRAL_KEYS, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> HybridModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.dense.eps)
        return bind_short_conv_model(bind, shape, lambda number: bind.swiglu(f"blk.{number}."))


FAMILY = Lfm2Family()
