"""olmo2: a norm after each half of a block and none before; rows of queries and keys are normed whole, then rotate.

Team OLMo 2024, "2 OLMo 2 Furious" (arXiv 2501.00656). Rotation pairs the two halves of a head.
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
    attention_matrices,
    gated_matrices,
    own_head,
    weights_of_all,
)
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.models.parts.decoder_family import plain_family
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "olmo2"


def tensor_shapes(shape: DenseShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    attention = attention_matrices(shape)
    norms: Shapes = {"post_attention_norm": (shape.hidden,), "post_ffw_norm": (shape.hidden,)}
    norms |= {"attn_q_norm": attention["attn_q"][:1], "attn_k_norm": attention["attn_k"][:1]}
    return weights_of_all(shape, norms | attention | gated_matrices(shape)), own_head(shape)


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    k_norm: Norm
    output: Projection
    post_attention_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    post_ffw_norm: Norm


@dataclass(frozen=True)
class Olmo2Model:
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
            mixed = self.attend(number, layer, x, angles, batch, cache)
            x = ops.add(x, ops.rms_norm(mixed, layer.post_attention_norm))
            x = ops.add(x, ops.rms_norm(self.feed_forward(layer, x), layer.post_ffw_norm))
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(
        self, number: int, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """The attention half of a block, cache written first: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v)
        q = ops.rope(ops.rms_norm(q, layer.q_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, layer.k_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project(ops.attention(q, cache, number, batch, self.attention), layer.output)[0]

    def feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """down(silu(gate x) · up x): [tokens, hidden] → the same."""
        gate, up = self.ops.project(x, layer.gate, layer.up)
        return self.ops.project(self.ops.silu_mul(gate, up), layer.down)[0]

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


def bind_model(bind: Binder, shape: DenseShape) -> Olmo2Model:
    """All weights."""
    ops, embedding = bind.ops, bind.matrix("token_embd.weight")
    return Olmo2Model(
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
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        output=bind.projection(f"{block}attn_output"),
        post_attention_norm=bind.norm(f"{block}post_attention_norm"),
        gate=bind.projection(f"{block}ffn_gate"),
        up=bind.projection(f"{block}ffn_up"),
        down=bind.projection(f"{block}ffn_down"),
        post_ffw_norm=bind.norm(f"{block}post_ffw_norm"),
    )


FAMILY = plain_family(ARCHITECTURE, DENSE_OPS | {"silu_mul", "add"}, tensor_shapes, bind_model)
