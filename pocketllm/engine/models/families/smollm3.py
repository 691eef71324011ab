"""smollm3: llama's block, of which every fourth does not rotate.

Hugging Face 2025, "SmolLM3"; Yang et al. 2025, "Rope to Nope and Back Again" (arXiv 2501.18795) for layers without
positions. In GGUF the rows of q and k are stored so that neighbors (0, 1), (2, 3), … rotate together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    Binder,
    DenseShape,
    Shapes,
    SwiGLU,
    attention_matrices,
    gated_matrices,
    own_head,
    weights_of_all,
)
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.models.parts.decoder_family import plain_family
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "smollm3"
PERIOD = 4
"""Every how many layers the last one does not rotate; no key tells it."""


def tensor_shapes(shape: DenseShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    norms: Shapes = {"attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,)}
    return weights_of_all(shape, norms | attention_matrices(shape) | gated_matrices(shape)), own_head(shape)


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    feed_forward: SwiGLU


@dataclass(frozen=True)
class SmolLM3Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    shape: DenseShape
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    attention: AttentionSpec
    kv_spec: KVSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for number, layer in enumerate(self.layers):
            x = self.attend(number, layer, x, angles, batch, cache)
            x = layer.feed_forward.add_to(x, ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(
        self, number: int, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """The attention half of a block, cache written first, residual added: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        if (number + 1) % PERIOD:
            q = ops.rope(q, angles, head_dim, RopeLayout.ADJACENT)
            k = ops.rope(k, angles, head_dim, RopeLayout.ADJACENT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project_add(ops.attention(q, cache, number, batch, self.attention), layer.output, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


def bind_model(bind: Binder, shape: DenseShape) -> SmolLM3Model:
    """All weights."""
    ops, embedding = bind.ops, bind.matrix("token_embd.weight")
    return SmolLM3Model(
        ops=ops,
        shape=shape,
        embedding=embedding,
        layers=[bind_layer(bind, f"blk.{number}.") for number in range(shape.num_layers)],
        output_norm=bind.norm("output_norm"),
        head=bind.head(embedding),
        inv_freq=ops.load_vector(inverse_frequencies(shape.rope)),
        rope_magnitude=rope_magnitude(shape.rope),
        attention=AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5),
        kv_spec=shape.kv,
        vocab_size=shape.vocab_size,
    )


def bind_layer(bind: Binder, block: str) -> Layer:
    """The weights of a block such as `blk.0.`."""
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        output=bind.projection(f"{block}attn_output"),
        feed_forward=bind.swiglu(block),
    )


FAMILY = plain_family(ARCHITECTURE, DENSE_OPS | {"silu_mul"}, tensor_shapes, bind_model, activation_bits=8)
