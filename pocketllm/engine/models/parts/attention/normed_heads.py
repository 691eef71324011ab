"""Decoders whose queries and keys are normed before their halves rotate: each head of them, or the whole row.

Qwen Team 2025, "Qwen3 Technical Report" (arXiv 2505.09388). The feed-forward of a layer is the family's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import Binder, DenseShape, Shapes, attention_matrices
from pocketllm.engine.models.contract import FeedForward, KVSpec
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude


@dataclass(frozen=True)
class NormedAttention:
    """The first half of a layer; `number`: of its cache's layers."""

    norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    """Of as many values as it norms together."""
    k_norm: Norm
    output: Projection
    spec: AttentionSpec
    number: int

    def add_to(self, x: Tensor, ops: Ops, angles: Tensor, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """x and what attention makes of it, cache written first: [tokens, hidden] → the same."""
        q, k, v = ops.project(x, self.q, self.k, self.v, norm=self.norm)
        q = ops.rope(ops.rms_norm(q, self.q_norm), angles, self.spec.head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, self.k_norm), angles, self.spec.head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(kv, self.number, k, v, batch)
        return ops.project_add(ops.attention(q, kv, self.number, batch, self.spec), self.output, x)


@dataclass(frozen=True)
class NormedHeadsModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    layers: Sequence[tuple[NormedAttention, FeedForward]]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: KVSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for attention, feed_forward in self.layers:
            x = feed_forward.add_to(attention.add_to(x, ops, angles, batch, cache), ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


def attention_biases(shape: DenseShape) -> Shapes:
    """Biases that a checkpoint may have beside every matrix of its attention."""
    rows = {name: rows for name, (rows, _) in attention_matrices(shape).items()}
    return {f"blk.{number}.{name}.bias": (rows[name],) for number in range(shape.num_layers) for name in rows}


def bind_normed_heads(
    bind: Binder, dense: DenseShape, feed_forward: Callable[[Binder, str], FeedForward]
) -> NormedHeadsModel:
    """feed_forward: binds the second half of a block such as `blk.0.`."""
    ops, embedding = bind.ops, bind.matrix("token_embd.weight")
    return NormedHeadsModel(
        ops=ops,
        embedding=embedding,
        layers=[
            (bind_attention(bind, dense, f"blk.{number}.", number), feed_forward(bind, f"blk.{number}."))
            for number in range(dense.num_layers)
        ],
        output_norm=bind.norm("output_norm"),
        head=bind.head(embedding),
        inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
        rope_magnitude=rope_magnitude(dense.rope),
        kv_spec=dense.kv,
        vocab_size=dense.vocab_size,
    )


def bind_attention(bind: Binder, dense: DenseShape, block: str, number: int) -> NormedAttention:
    """The first half of a block such as `blk.0.`; number: of its cache's layers."""
    return NormedAttention(
        norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        output=bind.projection(f"{block}attn_output"),
        spec=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.head_dim**-0.5),
        number=number,
    )
