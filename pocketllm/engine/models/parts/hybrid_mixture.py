"""Hybrids whose every feed-forward is a mixture with a gated shared expert: the frame of qwen3next and qwen35moe."""

from collections.abc import Callable
from dataclasses import dataclass

from pocketllm.engine.models.blocks import NEUTRAL_KEYS, Binder, Shapes, own_head
from pocketllm.engine.models.contract import ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.decoder_family import DecoderFamily
from pocketllm.engine.models.parts.hybrid import (
    HYBRID_OPS,
    DeltaLayer,
    HybridModel,
    HybridShape,
    bind_model,
    hybrid_shapes,
    read_hybrid_shape,
)
from pocketllm.engine.models.parts.mixtures.gated_experts import (
    GATED_EXPERTS_NEUTRAL,
    GATED_EXPERTS_OPS,
    GatedExpertsShape,
    bind_normed_experts,
    read_gated_experts,
)

NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | GATED_EXPERTS_NEUTRAL


@dataclass(frozen=True)
class HybridMixtureShape:
    """A hybrid decoder's sizes, and those of its experts."""

    hybrid: HybridShape
    experts: GatedExpertsShape

    def tensors(self, steps: Shapes) -> tuple[Shapes, Shapes]:
        """Tensors that a checkpoint needs, and those it may have; steps: as `hybrid_shapes` takes them."""
        dense = self.hybrid.dense
        return hybrid_shapes(self.hybrid, steps, self.experts.matrices(dense.hidden)), own_head(dense)


def read_hybrid_mixture(header: HeaderReader, vocab_size: int = 0) -> HybridMixtureShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    experts = read_gated_experts(header)
    return HybridMixtureShape(read_hybrid_shape(header, vocab_size, experts.intermediate), experts)


def hybrid_mixture_family(
    architecture: str,
    tensor_shapes: Callable[[HybridMixtureShape], tuple[Shapes, Shapes]],
    bind_delta: Callable[[Binder, HybridShape, int], DeltaLayer],
) -> DecoderFamily[HybridMixtureShape]:
    """bind_delta: the weights of a recurrent layer, which families store each in their own way."""

    def bind(bind: Binder, shape: HybridMixtureShape) -> HybridModel:
        return bind_model(
            bind,
            shape.hybrid,
            recurrent=lambda number: bind_delta(bind, shape.hybrid, number),
            feed_forward=lambda block: bind_normed_experts(bind, block, shape.experts),
        )

    return DecoderFamily(
        architecture=architecture,
        capability=ModelCapability(required_ops=HYBRID_OPS | GATED_EXPERTS_OPS),
        neutral=NEUTRAL,
        read_shape=read_hybrid_mixture,
        dense=lambda shape: shape.hybrid.dense,
        cache=lambda shape: shape.hybrid.cache,
        tensor_shapes=tensor_shapes,
        bind=bind,
    )
