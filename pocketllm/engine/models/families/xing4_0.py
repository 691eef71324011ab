"""xing4_0: latent attention and experts as in DeepSeek V3, around parallel residual streams.

DeepSeek-AI 2024, "DeepSeek-V3" (arXiv 2412.19437); Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections"
(arXiv 2512.24880) for the streams. A row is four streams, which a layer reads and writes twice; there is no residual
beside them, and their mean is what the head sees. They stay in float32 however a backend rounds what passes between
two matrices: with prompts that hold a turn's end, their values leave the range of half precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.models.blocks import (
    Binder,
    Shapes,
    SwiGLU,
    context_length,
    family_unmet,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import Checkpoint, LatentSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.attention.latent import (
    LATENT_OPS,
    NEUTRAL,
    LatentAttention,
    LatentShape,
    bind_attention,
    decoder_shapes,
    misfits,
    read_latent_shape,
)
from pocketllm.engine.models.parts.mixtures.experts import Mixture, bind_mixture
from pocketllm.engine.models.rope import inverse_frequencies

ARCHITECTURE = "xing4_0"
CLAMP = 30.0
"""Of the logits that mix streams; no key tells it."""
STREAM_OPS = frozenset({"open_streams", "read_streams", "write_streams", "mean_streams"})


@dataclass(frozen=True)
class Xing4Shape:
    """Sizes of the decoder, and how its streams are connected."""

    decoder: LatentShape
    num_streams: int
    iterations: int
    eps: float
    """Of the sums that mixing is divided by."""

    @property
    def num_shares(self) -> int:
        """Numbers that connect one sublayer: what it reads, what it writes, and how streams mix."""
        return self.num_streams * (2 + self.num_streams)


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Xing4Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    return Xing4Shape(
        decoder=read_latent_shape(header, vocab_size),
        num_streams=header.count("hyper_connection.count"),
        iterations=header.count("hyper_connection.sinkhorn_iterations"),
        eps=header.positive("hyper_connection.epsilon"),
    )


def tensor_shapes(shape: Xing4Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    streams: Shapes = {}
    for sublayer in ("attn", "ffn"):
        streams |= {
            f"hc_{sublayer}_fn.weight": (shape.num_shares, shape.num_streams * shape.decoder.hidden),
            f"hc_{sublayer}_base.weight": (shape.num_shares,),
            f"hc_{sublayer}_scale.weight": (3,),
        }
    return decoder_shapes(shape.decoder, lambda number: streams if number < shape.decoder.num_layers else {})


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attention_streams: HyperConnection
    attention: LatentAttention
    feed_forward_streams: HyperConnection
    feed_forward: SwiGLU | Mixture


@dataclass(frozen=True)
class Xing4Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    num_streams: int
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: LatentSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        streams = ops.open_streams(ops.embed(self.embedding, batch.input_ids), self.num_streams)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for number, layer in enumerate(self.layers):
            x, shares = ops.read_streams(streams, layer.attention_streams)
            attention = layer.attention
            found = attention.attend(number, attention.compress(x, ops), angles, batch, cache, ops)
            streams = ops.write_streams(streams, shares, ops.project(found, attention.output)[0])
            x, shares = ops.read_streams(streams, layer.feed_forward_streams)
            streams = ops.write_streams(streams, shares, layer.feed_forward.of(x, ops))
        last = ops.mean_streams(ops.take(streams, batch.logit_rows), self.num_streams)
        return ops.rms_norm(last, self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class Xing4Family:
    """How a xing4_0 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=LATENT_OPS | STREAM_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> LatentSpec:
        return usable(read_shape, metadata, ARCHITECTURE).decoder.kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        decoder = shape.decoder
        return family_unmet(
            checkpoint,
            header,
            decoder.num_layers + decoder.num_nextn,
            NEUTRAL,
            lambda: misfits(ARCHITECTURE, decoder, checkpoint, lambda: tensor_shapes(shape)),
        )

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Xing4Model:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        decoder = shape.decoder
        bind = Binder(checkpoint, ops, decoder.eps)
        embedding = bind.matrix("token_embd.weight")
        return Xing4Model(
            ops=ops,
            num_streams=shape.num_streams,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(decoder.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(decoder.rope)),
            rope_magnitude=decoder.magnitude,
            kv_spec=decoder.kv,
            vocab_size=decoder.vocab_size,
        )


def bind_layer(bind: Binder, shape: Xing4Shape, number: int) -> Layer:
    """One block's weights."""
    block, decoder = f"blk.{number}.", shape.decoder
    is_dense = number < decoder.num_dense
    return Layer(
        attention_streams=bind_streams(bind, f"{block}hc_attn", shape),
        attention=bind_attention(bind, block, decoder),
        feed_forward_streams=bind_streams(bind, f"{block}hc_ffn", shape),
        feed_forward=bind.swiglu(block) if is_dense else bind_mixture(bind, block, decoder.mixture),
    )


def bind_streams(bind: Binder, name: str, shape: Xing4Shape) -> HyperConnection:
    """How a sublayer such as `blk.0.hc_attn` is connected."""
    return HyperConnection(
        weight=bind.projection(f"{name}_fn"),
        scale=bind.vector(f"{name}_scale.weight"),
        base=bind.vector(f"{name}_base.weight"),
        num_streams=shape.num_streams,
        iterations=shape.iterations,
        eps=shape.eps,
        norm_eps=bind.eps,
        clamp=CLAMP,
    )


FAMILY = Xing4Family()
