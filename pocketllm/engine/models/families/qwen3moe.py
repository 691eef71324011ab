"""qwen3moe: qwen3's attention, and a mixture of experts in every layer.

Qwen Team 2025, "Qwen3 Technical Report" (arXiv 2505.09388). Experts are routed by softmax over all; the weights of
those used are normalized again. The two halves of a head rotate together.
"""

from dataclasses import dataclass

from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    own_head,
    read_dense_shape,
    weights_of_all,
)
from pocketllm.engine.models.contract import ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.attention.normed_heads import NormedHeadsModel, attention_biases, bind_normed_heads
from pocketllm.engine.models.parts.decoder_family import DecoderFamily
from pocketllm.engine.models.parts.mixtures.experts import MixtureShape, bind_mixture, mixture_shapes, read_mixture

ARCHITECTURE = "qwen3moe"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {
    "expert_gating_func": 1,
    "expert_group_count": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}


@dataclass(frozen=True)
class Qwen3MoeShape:
    """A plain decoder's sizes, its feed-forward's apart, and those of its experts."""

    dense: DenseShape
    mixture: MixtureShape


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Qwen3MoeShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dense = read_dense_shape(header, vocab_size)
    return Qwen3MoeShape(dense, read_mixture(header, dense.hidden, normalized=True))


def tensor_shapes(shape: Qwen3MoeShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    dense = shape.dense
    norms: Shapes = {"attn_norm": (dense.hidden,), "attn_q_norm": (dense.head_dim,), "attn_k_norm": (dense.head_dim,)}
    needed = weights_of_all(dense, norms | attention_matrices(dense))
    experts, _ = mixture_shapes(shape.mixture)
    for number in range(dense.num_layers):
        needed |= {f"blk.{number}.{name}": sizes for name, sizes in experts.items()}
    return needed, own_head(dense) | attention_biases(dense)


def bind_model(bind: Binder, shape: Qwen3MoeShape) -> NormedHeadsModel:
    """All weights."""
    return bind_normed_heads(bind, shape.dense, lambda bind, block: bind_mixture(bind, block, shape.mixture))


FAMILY = DecoderFamily(
    architecture=ARCHITECTURE,
    capability=ModelCapability(required_ops=DENSE_OPS | {"load_experts", "mixture", "add"}),
    neutral=NEUTRAL,
    read_shape=read_shape,
    dense=lambda shape: shape.dense,
    cache=lambda shape: shape.dense.kv,
    tensor_shapes=tensor_shapes,
    bind=bind_model,
)
