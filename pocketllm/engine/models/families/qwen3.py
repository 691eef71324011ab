"""qwen3: llama's block with each head of queries and keys normed before it rotates; the two halves of a head pair up.

Qwen Team 2025, "Qwen3 Technical Report" (arXiv 2505.09388).
"""

from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    gated_matrices,
    own_head,
    read_dense_shape,
    weights_of_all,
)
from pocketllm.engine.models.contract import ModelCapability
from pocketllm.engine.models.parts.decoder_family import DecoderFamily
from pocketllm.engine.models.parts.normed_heads import bind_normed_heads

ARCHITECTURE = "qwen3"


def tensor_shapes(shape: DenseShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    norms: Shapes = {"attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,)}
    norms |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
    return weights_of_all(shape, norms | attention_matrices(shape) | gated_matrices(shape)), own_head(shape)


FAMILY = DecoderFamily(
    architecture=ARCHITECTURE,
    capability=ModelCapability(required_ops=DENSE_OPS | {"silu_mul"}),
    neutral=NEUTRAL_KEYS,
    read_shape=read_dense_shape,
    dense=lambda shape: shape,
    cache=lambda shape: shape.kv,
    tensor_shapes=tensor_shapes,
    bind=lambda bind, shape: bind_normed_heads(bind, shape, Binder.swiglu),
)
