"""deepseek4: DeepSeek V4: a window of tokens and compressed groups of all before, between parallel residual streams.

DeepSeek-AI 2026, "DeepSeek-V4". A token has one row, key and value of all heads, whose rotation is taken back from what
attention finds. Layers see the latest tokens; and, by their ratio, none else, or entries of overlapping groups of 4
tokens of which an indexer picks some, or all entries of longer groups. Experts of the first layers go by token id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    bad_rotation,
    bad_vocabulary,
    context_length,
    family_unmet,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelCapability
from pocketllm.engine.models.header import HeaderReader, misfit
from pocketllm.engine.models.parts.attention.compressed import (
    COMPRESSED_OPS,
    CompressedAttention,
    CompressedShape,
    Step,
    attention_shapes,
    bad_compression,
    bind_attention,
    read_compressed,
)
from pocketllm.engine.models.parts.mixtures.limited_experts import (
    LIMITED_OPS,
    ROUTES,
    SQRT_SOFTPLUS,
    LimitedMixture,
    LimitedShape,
    bad_limited,
    bind_limited,
    limited_shapes,
    read_limited,
)
from pocketllm.engine.models.parts.soft_streams import (
    SOFT_STREAM_OPS,
    SoftStreams,
    bind_connection,
    read_soft_streams,
)
from pocketllm.engine.models.rope import RopeSpec, inverse_frequencies, read_rope

ARCHITECTURE = "deepseek4"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key not in ("expert_count", "attention.sliding_window")}


@dataclass(frozen=True)
class DeepSeek4Shape:
    """Sizes of the decoder, its attention, its experts and its streams."""

    num_layers: int
    hidden: int
    vocab_size: int
    eps: float
    attention: CompressedShape
    experts: LimitedShape
    streams: SoftStreams
    rope: RopeSpec
    """Of layers that see the window alone."""
    compressed_rope: RopeSpec
    """Of the others, for everything in them; its scaling leaves cosines and sines as long as they are."""


def read_shape(header: HeaderReader, vocab_size: int = 0) -> DeepSeek4Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    hidden, num_layers = header.count("embedding_length"), header.num_layers()
    attention = read_compressed(header, num_layers)
    scaled = read_rope(header, header.count("rope.dimension_count"), header.count("context_length"))
    return DeepSeek4Shape(
        num_layers=num_layers,
        hidden=hidden,
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        attention=attention,
        experts=read_limited(header, num_layers, SQRT_SOFTPLUS),
        streams=read_soft_streams(header),
        rope=RopeSpec(scaled.dim, scaled.theta, "none", 1.0, scaled.original_context, 1.0, 32.0, 1.0),
        compressed_rope=RopeSpec(
            scaled.dim,
            header.positive("attention.compress_rope_freq_base"),
            scaled.scaling,
            scaled.factor,
            scaled.original_context,
            1.0,
            scaled.beta_fast,
            scaled.beta_slow,
        ),
    )


def tensor_shapes(shape: DeepSeek4Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    num_streams = shape.streams.count
    needed: Shapes = {
        "token_embd.weight": (shape.vocab_size, shape.hidden),
        "output_norm.weight": (shape.hidden,),
        "output_hc_fn.weight": (num_streams, num_streams * shape.hidden),
        "output_hc_base.weight": (num_streams,),
        "output_hc_scale.weight": (1,),
    }
    for number in range(shape.num_layers):
        layer: Shapes = {"attn_norm.weight": (shape.hidden,), "ffn_norm.weight": (shape.hidden,)}
        layer |= attention_shapes(shape.attention, number, shape.hidden)
        layer |= limited_shapes(shape.experts, number, shape.hidden, shape.vocab_size)
        layer |= shape.streams.shapes(shape.hidden)
        needed |= {f"blk.{number}.{name}": rows for name, rows in layer.items()}
    return needed, {"output.weight": (shape.vocab_size, shape.hidden)}


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attention_streams: SoftConnection
    attention_norm: Norm
    attention: CompressedAttention
    feed_forward_streams: SoftConnection
    feed_forward_norm: Norm
    feed_forward: LimitedMixture


@dataclass(frozen=True)
class DeepSeek4Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    num_streams: int
    embedding: Weight
    layers: Sequence[Layer]
    output_streams: SoftConnection
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    compressed_inv_freq: Tensor
    kv_spec: CacheSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        streams = ops.open_streams(ops.embed(self.embedding, batch.input_ids), self.num_streams)
        angles = ops.rope_angles(self.inv_freq, batch.positions, 1.0)
        step = Step(batch, angles, ops.rope_angles(self.compressed_inv_freq, batch.positions, 1.0), cache)
        for layer in self.layers:
            x, shares = ops.read_soft_streams(streams, layer.attention_streams)
            found = layer.attention.of(ops.rms_norm(x, layer.attention_norm), ops, step)
            streams = ops.write_streams(streams, shares, found)
            x, shares = ops.read_soft_streams(streams, layer.feed_forward_streams)
            made = layer.feed_forward.of(ops.rms_norm(x, layer.feed_forward_norm), ops, batch)
            streams = ops.write_streams(streams, shares, made)
        last, _ = ops.read_soft_streams(ops.take(streams, batch.logit_rows), self.output_streams)
        return ops.rms_norm(last, self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class DeepSeek4Family:
    """How a deepseek4 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=COMPRESSED_OPS | LIMITED_OPS | SOFT_STREAM_OPS, tables=frozenset({ROUTES})
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).attention.cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return family_unmet(checkpoint, header, shape.num_layers, NEUTRAL, lambda: misfits(shape, checkpoint))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> DeepSeek4Model:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        compressed_freq = ops.load_vector(inverse_frequencies(shape.compressed_rope))
        return DeepSeek4Model(
            ops=ops,
            num_streams=shape.streams.count,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number, compressed_freq) for number in range(shape.num_layers)],
            output_streams=bind_connection(bind, "output_hc", replace(shape.streams, iterations=0)),
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(shape.rope)),
            compressed_inv_freq=compressed_freq,
            kv_spec=shape.attention.cache,
            vocab_size=shape.vocab_size,
        )


def misfits(shape: DeepSeek4Shape, checkpoint: Checkpoint) -> list[str]:
    """Sizes that do not go together, and tensors that do not fit."""
    return [
        *bad_vocabulary(checkpoint.metadata, shape.vocab_size),
        *bad_rotation(ARCHITECTURE, shape.compressed_rope, shape.attention.dim),
        *bad_rotation(ARCHITECTURE, shape.rope, shape.attention.dim),
        *bad_compression(ARCHITECTURE, shape.attention, shape.rope.dim),
        *(bad_limited(shape.experts, checkpoint) or misfit(checkpoint, *tensor_shapes(shape))),
    ]


def bind_layer(bind: Binder, shape: DeepSeek4Shape, number: int, compressed_freq: Tensor) -> Layer:
    """One block's weights."""
    block = f"blk.{number}."
    return Layer(
        attention_streams=bind_connection(bind, f"{block}hc_attn", shape.streams),
        attention_norm=bind.norm(f"{block}attn_norm"),
        attention=bind_attention(bind, shape.attention, number, compressed_freq),
        feed_forward_streams=bind_connection(bind, f"{block}hc_ffn", shape.streams),
        feed_forward_norm=bind.norm(f"{block}ffn_norm"),
        feed_forward=bind_limited(bind, shape.experts, number),
    )


FAMILY = DeepSeek4Family()
