"""llama: pre-norm attention with grouped keys, rotary positions, SwiGLU; most small dense models are this.

Touvron et al. 2023 (arXiv 2302.13971, 2307.09288), Ainslie et al. 2023 for grouped queries (arXiv 2305.13245).
Jiang et al. 2023, "Mistral 7B" (arXiv 2310.06825), for layers that all see a window, which is one key more.
In GGUF the rows of q and k are stored so that neighbors (0, 1), (2, 3), … rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    SwiGLU,
    attention_matrices,
    context_length,
    dense_unmet,
    gated_matrices,
    own_head,
    read_dense_shape,
    usable,
    vocab_rows,
    weights_of_all,
)
from pocketllm.engine.models.contract import Checkpoint, KVSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "llama"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "attention.sliding_window"}


def read_kv(header: HeaderReader) -> KVSpec:
    """What all layers keep, of the latest tokens alone where `attention.sliding_window` says so (0 is none)."""
    return replace(read_dense_shape(header).kv, window=header.count_or_none("attention.sliding_window") or None)


def tensor_shapes(shape: DenseShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    matrices = {**attention_matrices(shape), **gated_matrices(shape)}
    norms: Shapes = {"attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,)}
    optional = {**own_head(shape), "rope_freqs.weight": (shape.rope.dim // 2,)}
    for number in range(shape.num_layers):
        optional |= {f"blk.{number}.{name}.bias": (rows,) for name, (rows, _) in matrices.items()}
    return weights_of_all(shape, norms | matrices), optional


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
class LlamaModel:
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
        q = ops.rope(q, angles, head_dim, RopeLayout.ADJACENT)
        k = ops.rope(k, angles, head_dim, RopeLayout.ADJACENT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project_add(ops.attention(q, cache, number, batch, self.attention), layer.output, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class LlamaFamily:
    """How a llama header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=DENSE_OPS | {"silu_mul"},
        activation_bits=8,
        wide=frozenset({"attn_q", "attn_k", "attn_v", "output"}),
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        return usable(read_kv, metadata, ARCHITECTURE)

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_dense_shape(header, vocab_rows(checkpoint))
        header.count_or_none("attention.sliding_window")
        return dense_unmet(checkpoint, header, shape, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> LlamaModel:
        shape = usable(partial(read_dense_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        kv, scale = self.kv_spec(checkpoint.metadata), shape.head_dim**-0.5
        bind = Binder(checkpoint, ops, shape.eps, wide=self.capability.wide)
        embedding = bind.matrix("token_embd.weight")
        divisors = checkpoint.values("rope_freqs.weight") if "rope_freqs.weight" in checkpoint.tensors else None
        return LlamaModel(
            ops=ops,
            shape=shape,
            embedding=embedding,
            layers=[bind_layer(bind, f"blk.{number}.") for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(shape.rope, divisors)),
            rope_magnitude=rope_magnitude(shape.rope),
            attention=AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.head_dim, scale, window=kv.window),
            kv_spec=kv,
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


FAMILY = LlamaFamily()
