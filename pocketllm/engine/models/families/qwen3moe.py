"""qwen3moe: qwen3's attention, and a mixture of experts for every feed-forward.

Qwen Team 2025, "Qwen3 Technical Report" (arXiv 2505.09388). The router's softmax goes over all experts; the weights of
those used are normalized again. The two halves of a head rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import (
    Experts,
    Gating,
    KVCache,
    Norm,
    Ops,
    Projection,
    RopeLayout,
    Routing,
    Tensor,
    Weight,
)
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    context_length,
    dense_unmet,
    own_head,
    read_dense_shape,
    usable,
    vocab_rows,
    weights_of_all,
)
from pocketllm.engine.models.contract import Checkpoint, KVSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "qwen3moe"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {
    "expert_gating_func": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}


@dataclass(frozen=True)
class Qwen3MoeShape:
    """A plain decoder's sizes, its feed-forward's apart, and those of its experts."""

    dense: DenseShape
    num_experts: int
    num_used: int
    intermediate: int
    """Of each expert."""
    normalized: bool


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Qwen3MoeShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_experts, num_used = header.count("expert_count"), header.count("expert_used_count")
    if num_used > num_experts:
        header.problems.append(
            f"metadata key {ARCHITECTURE}.expert_used_count is {num_used}: there are only {num_experts} experts"
        )
    return Qwen3MoeShape(
        dense=read_dense_shape(header, vocab_size),
        num_experts=num_experts,
        num_used=num_used,
        intermediate=header.count("expert_feed_forward_length"),
        normalized=header.flag("expert_weights_norm", True),
    )


def tensor_shapes(shape: Qwen3MoeShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    dense, inner = shape.dense, (shape.num_experts, shape.intermediate, shape.dense.hidden)
    layer: Shapes = {
        "attn_norm": (dense.hidden,),
        "attn_q_norm": (dense.head_dim,),
        "attn_k_norm": (dense.head_dim,),
        **attention_matrices(dense),
        "ffn_norm": (dense.hidden,),
        "ffn_gate_inp": (shape.num_experts, dense.hidden),
        "ffn_gate_exps": inner,
        "ffn_up_exps": inner,
        "ffn_down_exps": (shape.num_experts, dense.hidden, shape.intermediate),
    }
    return weights_of_all(dense, layer), own_head(dense)


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    k_norm: Norm
    output: Projection
    ffn_norm: Norm
    experts: Experts


@dataclass(frozen=True)
class Qwen3MoeModel:
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
            x = ops.add(x, ops.mixture(ops.rms_norm(x, layer.ffn_norm), layer.experts))
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(
        self, number: int, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """The attention half of a block, cache written first, residual added: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        q = ops.rope(ops.rms_norm(q, layer.q_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, layer.k_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project_add(ops.attention(q, cache, number, batch, self.attention), layer.output, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class Qwen3MoeFamily:
    """How a qwen3moe header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=DENSE_OPS | {"load_experts", "mixture", "add"})

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        return usable(read_dense_shape, metadata, ARCHITECTURE).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Qwen3MoeModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        dense = shape.dense
        bind = Binder(checkpoint, ops, dense.eps)
        embedding = bind.matrix("token_embd.weight")
        routing = Routing(shape.num_used, Gating.SOFTMAX, shape.normalized)
        return Qwen3MoeModel(
            ops=ops,
            shape=dense,
            embedding=embedding,
            layers=[bind_layer(bind, f"blk.{number}.", routing) for number in range(dense.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
            rope_magnitude=rope_magnitude(dense.rope),
            attention=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.head_dim**-0.5),
            kv_spec=dense.kv,
            vocab_size=dense.vocab_size,
        )


def bind_layer(bind: Binder, block: str, routing: Routing) -> Layer:
    """The weights of a block such as `blk.0.`."""
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        output=bind.projection(f"{block}attn_output"),
        ffn_norm=bind.norm(f"{block}ffn_norm"),
        experts=Experts(
            router=bind.router(block),
            gate=bind.experts(f"{block}ffn_gate_exps"),
            up=bind.experts(f"{block}ffn_up_exps"),
            down=bind.experts(f"{block}ffn_down_exps"),
            routing=routing,
        ),
    )


FAMILY = Qwen3MoeFamily()
