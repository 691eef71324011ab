"""gemma2: norms before and after each half of a block, local layers in turn with global ones, capped scores and logits.

Gemma Team 2024, "Gemma 2" (arXiv 2408.00118). GGUF stores norm weights with the 1 already added, and rotation pairs the
two halves of a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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
    context_length,
    dense_unmet,
    gated_matrices,
    own_head,
    read_dense_shape,
    read_windows,
    usable,
    vocab_rows,
    weights_of_all,
)
from pocketllm.engine.models.contract import Checkpoint, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "gemma2"
OWN_KEYS = {"attention.sliding_window", "attention.scale", "attn_logit_softcapping", "final_logit_softcapping"}
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key not in OWN_KEYS} | {"rope.freq_base_swa": None}
LAYERS_OF_27B = 46
"""The one size whose scores are divided by the root of hidden / heads instead of the head's size; its files have no
`attention.scale`, which would tell it."""


@dataclass(frozen=True)
class Gemma2Shape:
    """A plain decoder's sizes, its local layers, and what caps its scores and logits."""

    dense: DenseShape
    windows: Windows
    score_cap: float
    logit_cap: float
    said_scale: float | None
    """What scores are multiplied by, where the header says it."""

    @property
    def cache(self) -> SeveralCaches:
        return self.windows.caches(self.dense.kv)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        if self.said_scale is not None:
            return self.said_scale
        dense = self.dense
        divisor = dense.hidden // dense.num_heads if dense.num_layers == LAYERS_OF_27B else dense.head_dim
        return float(divisor**-0.5)


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Gemma2Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dense = read_dense_shape(header, vocab_size)
    return Gemma2Shape(
        dense=dense,
        windows=read_windows(header, dense.num_layers, period=2, size=4096),
        score_cap=header.positive("attn_logit_softcapping", 50.0),
        logit_cap=header.positive("final_logit_softcapping", 30.0),
        said_scale=header.positive_or_none("attention.scale"),
    )


def tensor_shapes(shape: Gemma2Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    dense = shape.dense
    layer: Shapes = dict.fromkeys(norms, (dense.hidden,))
    return weights_of_all(dense, layer | attention_matrices(dense) | gated_matrices(dense)), own_head(dense)


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    post_attention_norm: Norm
    ffn_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    post_ffw_norm: Norm
    attention: AttentionSpec
    place: int
    """Which layer of its cache it is."""


@dataclass(frozen=True)
class Gemma2Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    shape: DenseShape
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    logit_cap: float
    kv_spec: SeveralCaches
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids, scale=self.shape.hidden**0.5)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for layer in self.layers:
            mixed = self.attend(layer, x, angles, batch, cache[0 if layer.attention.window is None else -1])
            x = ops.add(x, ops.rms_norm(mixed, layer.post_attention_norm))
            x = ops.add(x, ops.rms_norm(self.feed_forward(layer, x), layer.post_ffw_norm))
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(self, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The attention half of a block, cache written first: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        q = ops.rope(q, angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(k, angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, layer.place, k, v, batch)
        return ops.project(ops.attention(q, cache, layer.place, batch, layer.attention), layer.output)[0]

    def feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """down(gelu(gate x) · up x), x normed first: [tokens, hidden] → the same."""
        gate, up = self.ops.project(x, layer.gate, layer.up, norm=layer.ffn_norm)
        return self.ops.project(self.ops.gelu_mul(gate, up), layer.down)[0]

    def logits(self, hidden: Tensor) -> Any:
        """Capped logits as float32 numpy: [rows, vocab]."""
        logits = self.ops.to_numpy(self.ops.project(hidden, self.head)[0])
        return self.logit_cap * np.tanh(logits / self.logit_cap)


class Gemma2Family:
    """How a gemma2 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=DENSE_OPS | {"gelu_mul", "add"}, activation_bits=8)

    def kv_spec(self, metadata: Mapping[str, Any]) -> SeveralCaches:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Gemma2Model:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        dense = shape.dense
        bind = Binder(checkpoint, ops, dense.eps)
        embedding = bind.matrix("token_embd.weight")
        return Gemma2Model(
            ops=ops,
            shape=dense,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(dense.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
            rope_magnitude=rope_magnitude(dense.rope),
            logit_cap=shape.logit_cap,
            kv_spec=shape.cache,
            vocab_size=dense.vocab_size,
        )


def bind_layer(bind: Binder, shape: Gemma2Shape, number: int) -> Layer:
    """One block's weights and what it sees."""
    block, dense, window = f"blk.{number}.", shape.dense, shape.windows.of(number)
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        output=bind.projection(f"{block}attn_output"),
        post_attention_norm=bind.norm(f"{block}post_attention_norm"),
        ffn_norm=bind.norm(f"{block}ffn_norm"),
        gate=bind.projection(f"{block}ffn_gate"),
        up=bind.projection(f"{block}ffn_up"),
        down=bind.projection(f"{block}ffn_down"),
        post_ffw_norm=bind.norm(f"{block}post_ffw_norm"),
        attention=AttentionSpec(
            dense.num_heads, dense.num_kv_heads, dense.head_dim, shape.scale, window=window, softcap=shape.score_cap
        ),
        place=shape.windows.place(number),
    )


FAMILY = Gemma2Family()
