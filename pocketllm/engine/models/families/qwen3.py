"""qwen3: llama's block with each head of queries and keys normed before it rotates; the two halves of a head pair up.

Qwen Team 2025, "Qwen3 Technical Report" (arXiv 2505.09388).
"""

from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    gated_matrices,
    own_head,
    weights_of_all,
)
from pocketllm.engine.models.parts.attention.normed_heads import NormedHeadsModel, attention_biases, bind_normed_heads
from pocketllm.engine.models.parts.decoder_family import plain_family

ARCHITECTURE = "qwen3"


def tensor_shapes(shape: DenseShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    norms: Shapes = {"attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,)}
    norms |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
    needed = weights_of_all(shape, norms | attention_matrices(shape) | gated_matrices(shape))
    return needed, own_head(shape) | attention_biases(shape)


def bind_model(bind: Binder, shape: DenseShape) -> NormedHeadsModel:
    """All weights."""
    return bind_normed_heads(bind, shape, Binder.swiglu)


FAMILY = plain_family(ARCHITECTURE, DENSE_OPS | {"silu_mul"}, tensor_shapes, bind_model, activation_bits=8)
