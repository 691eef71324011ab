"""qwen35moe: qwen35's layers, with a mixture of experts and a shared one for every feed-forward.

Qwen Team 2026, "Qwen3.5". Norms are stored with their 1 added, but for the one within a DeltaNet head; value heads are
stored tiled: head j reads key head j mod the number of key heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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

ARCHITECTURE = "qwen35moe"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | GATED_EXPERTS_NEUTRAL


@dataclass(frozen=True)
class Qwen35MoeShape:
    """A hybrid decoder's sizes, and those of its experts."""

    hybrid: HybridShape
    experts: GatedExpertsShape


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Qwen35MoeShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    experts = read_gated_experts(header)
    return Qwen35MoeShape(read_hybrid_shape(header, vocab_size, experts.intermediate), experts)


def tensor_shapes(shape: Qwen35MoeShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hybrid, hidden = shape.hybrid, shape.hybrid.dense.hidden
    logits = (hybrid.num_value_heads, hidden)
    steps: Shapes = {"ssm_alpha.weight": logits, "ssm_beta.weight": logits}
    return hybrid_shapes(hybrid, steps, shape.experts.matrices(hidden)), own_head(hybrid.dense)


def bind_delta(bind: Binder, shape: HybridShape, number: int) -> DeltaLayer:
    """The weights of a recurrent layer, heads as they are stored."""
    block = f"blk.{number}."
    return DeltaLayer(
        norm=bind.norm(f"{block}attn_norm"),
        qkv=bind.projection(f"{block}attn_qkv"),
        gate=bind.projection(f"{block}attn_gate"),
        step=bind.projection(f"{block}ssm_alpha"),
        share=bind.projection(f"{block}ssm_beta"),
        kernel=bind.vector(f"{block}ssm_conv1d.weight"),
        net=DeltaNet(
            num_key_heads=shape.num_key_heads,
            num_value_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            is_tiled=True,
            rate=bind.vector(f"{block}ssm_a"),
            time_bias=bind.vector(f"{block}ssm_dt.bias"),
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=shape.place(number),
    )


class Qwen35MoeFamily:
    """How a qwen35moe header is read and its model built."""

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


FAMILY = Qwen35MoeFamily()
