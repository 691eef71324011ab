"""qwen3next: Gated DeltaNet and gated attention in turns, and a mixture of experts with a shared one in every layer.

Qwen Team 2025, "Qwen3-Next". Norms are stored with their 1 added, but for the one within a DeltaNet head; value heads
that share a key head are neighbors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    context_length,
    dense_unmet,
    own_head,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.gated_experts import (
    GATED_EXPERTS_NEUTRAL,
    GATED_EXPERTS_OPS,
    GatedExpertsShape,
    bind_normed_experts,
    read_gated_experts,
)
from pocketllm.engine.models.parts.hybrid import (
    HYBRID_OPS,
    DeltaLayer,
    HybridModel,
    HybridShape,
    bind_model,
    hybrid_shapes,
    read_hybrid_shape,
)

ARCHITECTURE = "qwen3next"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | GATED_EXPERTS_NEUTRAL


@dataclass(frozen=True)
class Qwen3NextShape:
    """A hybrid decoder's sizes, and those of its experts."""

    hybrid: HybridShape
    experts: GatedExpertsShape


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Qwen3NextShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    experts = read_gated_experts(header)
    return Qwen3NextShape(read_hybrid_shape(header, vocab_size, experts.intermediate), experts)


def tensor_shapes(shape: Qwen3NextShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hybrid, hidden = shape.hybrid, shape.hybrid.dense.hidden
    steps: Shapes = {"ssm_ba.weight": (2 * hybrid.num_value_heads, hidden)}
    return hybrid_shapes(hybrid, steps, shape.experts.matrices(hidden)), own_head(hybrid.dense)


def bind_delta(bind: Binder, shape: HybridShape, number: int) -> DeltaLayer:
    """The weights of a recurrent layer; a key head's rows of `ssm_ba` are its value heads' shares, then their steps."""
    block, heads = f"blk.{number}.", shape.num_value_heads
    by_key_head = np.arange(2 * heads).reshape(shape.num_key_heads, 2, heads // shape.num_key_heads)
    share, step = bind.rows(f"{block}ssm_ba", by_key_head[:, 0], by_key_head[:, 1])
    return DeltaLayer(
        norm=bind.norm(f"{block}attn_norm"),
        qkv=bind.projection(f"{block}attn_qkv"),
        gate=bind.projection(f"{block}attn_gate"),
        step=step,
        share=share,
        kernel=bind.vector(f"{block}ssm_conv1d.weight"),
        net=DeltaNet(
            num_key_heads=shape.num_key_heads,
            num_value_heads=heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            is_tiled=False,
            rate=bind.vector(f"{block}ssm_a"),
            time_bias=bind.vector(f"{block}ssm_dt.bias"),
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=shape.place(number),
    )


class Qwen3NextFamily:
    """How a qwen3next header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=HYBRID_OPS | GATED_EXPERTS_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).hybrid.cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.hybrid.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> HybridModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.hybrid.dense.eps)
        return bind_model(
            bind,
            shape.hybrid,
            recurrent=lambda number: bind_delta(bind, shape.hybrid, number),
            feed_forward=lambda block: bind_normed_experts(bind, block, shape.experts),
        )


FAMILY = Qwen3NextFamily()
