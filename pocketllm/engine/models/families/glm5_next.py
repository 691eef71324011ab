"""glm5-next: GLM 5.3 Flash: Kimi Delta Attention, and latent attention over picked pools, between residual streams.

Z.ai 2026, the configuration and model card of GLM-5.3-Flash. A layer's kind is told by its number of key heads: 0 for a
recurrent one. Nothing rotates. Feed-forwards are limited; experts after the first layers are chosen by sigmoid with a
bias that does not weigh. The head reads the mean of the streams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    bad_vocabulary,
    context_length,
    family_unmet,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader, is_list, misfit, short
from pocketllm.engine.models.parts.attention.pooled import (
    POOLED_NEUTRAL,
    POOLED_OPS,
    PooledAttention,
    PooledShape,
    bind_pooled,
    read_indexers,
    read_pooled,
)
from pocketllm.engine.models.parts.kimi_delta import (
    KIMI_DELTA_OPS,
    KimiDeltaLayer,
    KimiDeltaShape,
    bind_kimi_delta,
    read_kimi_delta,
    with_kernels_as_named,
)
from pocketllm.engine.models.parts.mixtures.limited_experts import (
    LIMITED_OPS,
    SIGMOID,
    LimitedMixture,
    LimitedShape,
    LimitedSwiGLU,
    bind_limited,
    bind_limited_swiglu,
    gated_shapes,
    limited_shapes,
    read_limited,
)
from pocketllm.engine.models.parts.soft_streams import (
    SOFT_STREAM_OPS,
    SoftStreams,
    bind_connection,
    read_soft_streams,
)

ARCHITECTURE = "glm5-next"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {
    **POOLED_NEUTRAL,
    "expert_group_count": 1,
    "hash_layer_count": 0,
}
PLAIN_OPS = DENSE_OPS - {"new_kv_cache", "project_add", "rope_angles", "rope", "store_kv", "attention"}


@dataclass(frozen=True)
class Glm5NextShape:
    """Sizes of the decoder, and of both kinds of its layers."""

    num_layers: int
    num_dense: int
    """First layers, whose feed-forward is no mixture."""
    hidden: int
    intermediate: int
    vocab_size: int
    eps: float
    has_attention: tuple[bool, ...]
    has_indexer: tuple[bool, ...]
    attention: PooledShape
    recurrent: KimiDeltaShape
    experts: LimitedShape
    streams: SoftStreams

    @property
    def cache(self) -> CacheSpec:
        """What attention keeps, then the recurrent layers' states."""
        num_attending = sum(self.has_attention)
        states = self.recurrent.states(self.num_layers - num_attending)
        return SeveralCaches((*self.attention.caches(num_attending, sum(self.has_indexer)), *states))


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Glm5NextShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_layers = header.num_layers()
    has_attention = read_kinds(header, num_layers)
    return Glm5NextShape(
        num_layers=num_layers,
        num_dense=header.count_or_none("leading_dense_block_count"),
        hidden=header.count("embedding_length"),
        intermediate=header.one_count("feed_forward_length"),
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        has_attention=has_attention,
        has_indexer=read_indexers(header, has_attention),
        attention=read_pooled(header),
        recurrent=read_kimi_delta(header),
        experts=read_limited(header, num_layers, SIGMOID, default=SIGMOID),
        streams=read_soft_streams(header),
    )


def read_kinds(header: HeaderReader, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it has attention: `attention.head_count_kv` is 1 for those, 0 for recurrent ones."""
    name = f"{ARCHITECTURE}.attention.head_count_kv"
    counts = header.metadata.get(name)
    own = list(counts[:num_layers]) if is_list(counts) else []
    if len(own) != num_layers or any(count not in (0, 1) for count in own) or not 0 < sum(own) < num_layers:
        header.problems.append(
            f"metadata key {name} is {short(counts)}: it must be 1 for each layer with attention, 0 for the others, "
            "and there must be both"
        )
        return (True, False)
    return tuple(count == 1 for count in own)


def tensor_shapes(shape: Glm5NextShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hidden, table = shape.hidden, (shape.vocab_size, shape.hidden)
    needed: Shapes = {"token_embd.weight": table, "output_norm.weight": (hidden,)}
    for number, attends in enumerate(shape.has_attention):
        layer: Shapes = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
        layer |= shape.streams.shapes(hidden)
        layer |= (
            shape.attention.tensors(hidden, shape.has_indexer[number]) if attends else shape.recurrent.tensors(hidden)
        )
        layer |= (
            gated_shapes("", hidden, shape.intermediate)
            if number < shape.num_dense
            else limited_shapes(shape.experts, number, hidden, shape.vocab_size)
        )
        needed |= {f"blk.{number}.{name}": sizes for name, sizes in layer.items()}
    return needed, {"output.weight": table}


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    first_streams: SoftConnection
    first_norm: Norm
    first: KimiDeltaLayer | PooledAttention
    second_streams: SoftConnection
    second_norm: Norm
    second: LimitedSwiGLU | LimitedMixture


@dataclass(frozen=True)
class Glm5NextModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    num_streams: int
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    kv_spec: CacheSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops, attended, states = self.ops, cache[:3], cache[3:]
        streams = ops.open_streams(ops.embed(self.embedding, batch.input_ids), self.num_streams)
        selection = None
        for layer in self.layers:
            x, shares = ops.read_soft_streams(streams, layer.first_streams)
            y = ops.rms_norm(x, layer.first_norm)
            if isinstance(layer.first, PooledAttention):
                found, selection = layer.first.of(y, ops, batch, attended, selection)
            else:
                found = layer.first.of(y, ops, batch, states)
            streams = ops.write_streams(streams, shares, found)
            x, shares = ops.read_soft_streams(streams, layer.second_streams)
            made = layer.second.of(ops.rms_norm(x, layer.second_norm), ops, batch)
            streams = ops.write_streams(streams, shares, made)
        last = ops.mean_streams(ops.take(streams, batch.logit_rows), self.num_streams)
        return ops.rms_norm(last, self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class Glm5NextFamily:
    """How a glm5-next header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=PLAIN_OPS | SOFT_STREAM_OPS | {"mean_streams"} | KIMI_DELTA_OPS | POOLED_OPS | LIMITED_OPS
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return family_unmet(checkpoint, header, shape.num_layers, NEUTRAL, lambda: misfits(shape, checkpoint))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Glm5NextModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        return Glm5NextModel(
            ops=ops,
            num_streams=shape.streams.count,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            kv_spec=shape.cache,
            vocab_size=shape.vocab_size,
        )


def misfits(shape: Glm5NextShape, checkpoint: Checkpoint) -> list[str]:
    """Sizes that do not go together, and tensors that do not fit."""
    needed, optional = tensor_shapes(shape)
    return [
        *bad_vocabulary(checkpoint.metadata, shape.vocab_size),
        *misfit(checkpoint, with_kernels_as_named(checkpoint.tensors, needed), optional),
    ]


def bind_layer(bind: Binder, shape: Glm5NextShape, number: int) -> Layer:
    """One block's weights."""
    block = f"blk.{number}."
    is_dense = number < shape.num_dense
    return Layer(
        first_streams=bind_connection(bind, f"{block}hc_attn", shape.streams),
        first_norm=bind.norm(f"{block}attn_norm"),
        first=bind_first(bind, shape, number),
        second_streams=bind_connection(bind, f"{block}hc_ffn", shape.streams),
        second_norm=bind.norm(f"{block}ffn_norm"),
        second=(
            bind_limited_swiglu(bind, block, "", shape.experts.shared_limits[number])
            if is_dense
            else bind_limited(bind, shape.experts, number)
        ),
    )


def bind_first(bind: Binder, shape: Glm5NextShape, number: int) -> KimiDeltaLayer | PooledAttention:
    """The first half of a layer."""
    block, attends = f"blk.{number}.", shape.has_attention[number]
    place = shape.has_attention[:number].count(attends)
    if not attends:
        return bind_kimi_delta(bind, block, shape.recurrent, place)
    indexer = sum(shape.has_indexer[:number]) if shape.has_indexer[number] else None
    return bind_pooled(bind, block, shape.attention, place, indexer)


FAMILY = Glm5NextFamily()
