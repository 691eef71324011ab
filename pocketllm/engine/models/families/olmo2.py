"""olmo2: a norm after each half of a block and none before; rows of queries and keys are normed whole, then rotate.

Team OLMo 2024, "2 OLMo 2 Furious" (arXiv 2501.00656). Rotation pairs the two halves of a head. Olmo 3 is the same with
layers that see a window, in turn with global ones; only global ones are scaled to longer contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    Windows,
    attention_matrices,
    gated_matrices,
    own_head,
    read_dense_shape,
    read_windows,
    weights_of_all,
)
from pocketllm.engine.models.contract import ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.decoder_family import DecoderFamily
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "olmo2"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "attention.sliding_window"}
OLMO_3_PERIOD = 4
"""Every how many layers the last one is global, of a file that says a window and no pattern."""


@dataclass(frozen=True)
class Olmo2Shape:
    """A plain decoder's sizes, which of its layers see a window, and the base of those layers' rotation."""

    dense: DenseShape
    windows: Windows
    local_theta: float

    @property
    def cache(self) -> SeveralCaches:
        return self.windows.caches(self.dense.kv)


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Olmo2Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dense = read_dense_shape(header, vocab_size)
    windows = read_windows(header, dense.num_layers, OLMO_3_PERIOD)
    return Olmo2Shape(dense, windows, header.positive("rope.freq_base_swa", dense.rope.theta))


def tensor_shapes(sizes: Olmo2Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    shape = sizes.dense
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
    attention: AttentionSpec
    place: int
    """Which layer of its cache it is."""


@dataclass(frozen=True)
class Olmo2Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    shape: DenseShape
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    global_freq: Tensor
    local_freq: Tensor
    global_magnitude: float
    kv_spec: SeveralCaches
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        everywhere = ops.rope_angles(self.global_freq, batch.positions, self.global_magnitude)
        nearby = ops.rope_angles(self.local_freq, batch.positions, 1.0)
        for layer in self.layers:
            is_global = layer.attention.window is None
            mixed = self.attend(layer, x, everywhere if is_global else nearby, batch, cache[0 if is_global else -1])
            x = ops.add(x, ops.rms_norm(mixed, layer.post_attention_norm))
            x = ops.add(x, ops.rms_norm(self.feed_forward(layer, x), layer.post_ffw_norm))
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(self, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The attention half of a block, cache written first: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v)
        q = ops.rope(ops.rms_norm(q, layer.q_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, layer.k_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, layer.place, k, v, batch)
        return ops.project(ops.attention(q, cache, layer.place, batch, layer.attention), layer.output)[0]

    def feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """down(silu(gate x) · up x): [tokens, hidden] → the same."""
        gate, up = self.ops.project(x, layer.gate, layer.up)
        return self.ops.project(self.ops.silu_mul(gate, up), layer.down)[0]

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


def bind_model(bind: Binder, shape: Olmo2Shape) -> Olmo2Model:
    """All weights."""
    ops, embedding, dense = bind.ops, bind.matrix("token_embd.weight"), shape.dense
    local_rope = replace(dense.rope, theta=shape.local_theta, scaling="none")
    return Olmo2Model(
        ops=ops,
        shape=dense,
        embedding=embedding,
        layers=[bind_layer(bind, shape, number) for number in range(dense.num_layers)],
        output_norm=bind.norm("output_norm"),
        head=bind.head(embedding),
        global_freq=ops.load_vector(inverse_frequencies(dense.rope)),
        local_freq=ops.load_vector(inverse_frequencies(local_rope)),
        global_magnitude=rope_magnitude(dense.rope),
        kv_spec=shape.cache,
        vocab_size=dense.vocab_size,
    )


def bind_layer(bind: Binder, shape: Olmo2Shape, number: int) -> Layer:
    """One block's weights and what it sees."""
    block, dense, window = f"blk.{number}.", shape.dense, shape.windows.of(number)
    scale = dense.head_dim**-0.5
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
        attention=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, scale, window=window),
        place=shape.windows.place(number),
    )


FAMILY = DecoderFamily(
    architecture=ARCHITECTURE,
    capability=ModelCapability(required_ops=DENSE_OPS | {"silu_mul", "add"}, activation_bits=8),
    neutral=NEUTRAL,
    read_shape=read_shape,
    dense=lambda shape: shape.dense,
    cache=lambda shape: shape.cache,
    tensor_shapes=tensor_shapes,
    bind=bind_model,
)
