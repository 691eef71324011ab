"""qwen4exp: Gated DeltaNet, and attention over groups that an index picks, between parallel residual streams.

Qwen Team 2026, "Qwen3.8-Flash-Next". A layer has no norm but that of its streams, and experts with a shared one for its
feed-forward; one layer's streams get rows of hashed n-grams. The gate of a DeltaNet layer is a sigmoid, value heads are
stored tiled, and norms with their 1 added, but for the one within a DeltaNet head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    context_length,
    dense_unmet,
    own_head,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, LatentSpec, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.attention.indexed import INDEXED_OPS, IndexShape, Step, bind_indexed, read_index
from pocketllm.engine.models.parts.gated_streams import (
    GATED_STREAMS_OPS,
    Gates,
    StreamReader,
    bind_gates,
    bind_reader,
    stream_shapes,
)
from pocketllm.engine.models.parts.hybrid import HYBRID_OPS, HybridShape, hybrid_shapes, read_hybrid_shape, step_shapes
from pocketllm.engine.models.parts.mixtures.gated_experts import (
    GATED_EXPERTS_NEUTRAL,
    GATED_EXPERTS_OPS,
    GatedExperts,
    GatedExpertsShape,
    bind_gated_experts,
    read_gated_experts,
)
from pocketllm.engine.models.parts.ngrams import (
    NGRAM_OPS,
    NGramLayer,
    NGramShape,
    bind_ngrams,
    read_ngrams,
    with_rows_of,
)
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "qwen4exp"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | GATED_EXPERTS_NEUTRAL
STREAM_NORMS = ("attn_norm", "post_attention_norm", "output_norm")
"""Names of a hybrid's norms, in whose place the streams' are."""


@dataclass(frozen=True)
class Qwen4ExpShape:
    """A hybrid decoder's sizes, and those of its experts, streams, index and n-grams."""

    hybrid: HybridShape
    experts: GatedExpertsShape
    num_streams: int
    low_rank: int
    index: IndexShape
    ngrams: NGramShape | None

    @property
    def wide(self) -> int:
        """All streams of a token."""
        return self.num_streams * self.hybrid.dense.hidden

    @property
    def cache(self) -> CacheSpec:
        """Keys and values, index keys, the recurrent layers' states, and what n-grams look back on."""
        kv, states = self.hybrid.caches
        more = self.ngrams.states(self.wide) if self.ngrams is not None else ()
        return SeveralCaches((kv, LatentSpec(kv.num_layers, self.index.dim), states, *more))


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Qwen4ExpShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    experts = read_gated_experts(header)
    hybrid = read_hybrid_shape(header, vocab_size, experts.intermediate)
    return Qwen4ExpShape(
        hybrid=hybrid,
        experts=experts,
        num_streams=header.count("hyper_connection.count"),
        low_rank=header.count("hyper_connection.low_rank"),
        index=read_index(header, hybrid),
        ngrams=read_ngrams(header),
    )


def tensor_shapes(shape: Qwen4ExpShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hybrid, hidden = shape.hybrid, shape.hybrid.dense.hidden
    needed = hybrid_shapes(hybrid, step_shapes(hybrid), shape.experts.matrices(hidden))
    needed = {name: rows for name, rows in needed.items() if name.split(".")[-2] not in STREAM_NORMS}
    reading, writing = stream_shapes(shape.num_streams, hidden, shape.low_rank)
    needed |= {f"output_hc_{name}": rows for name, rows in reading.items()}
    for number, is_recurrent in enumerate(hybrid.is_recurrent):
        for half in ("attn", "ffn"):
            needed |= {f"blk.{number}.hc_{half}_{name}": rows for name, rows in (reading | writing).items()}
        if not is_recurrent:
            needed |= {
                f"blk.{number}.indexer.{name}.weight": rows for name, rows in shape.index.tensors(hidden).items()
            }
    if shape.ngrams is not None:
        needed |= shape.ngrams.tensors(shape.wide, hidden)
    return needed, own_head(hybrid.dense)


# -- layers ----------------------------------------------------------------------------------------------------------
class Half(Protocol):
    """The first half of a layer."""

    def of(self, y: Tensor, ops: Ops, step: Step) -> Tensor:
        """What it makes of what it reads: [tokens, hidden] → the same."""


@dataclass(frozen=True)
class SigmoidDelta:
    """Gated DeltaNet whose heads' norm is under a sigmoid gate."""

    qkv: Projection
    gate: Projection
    step: Projection
    share: Projection
    kernel: Tensor
    net: DeltaNet
    head_norm: Norm
    output: Projection
    place: int

    def of(self, y: Tensor, ops: Ops, step: Step) -> Tensor:
        mixed, gate, time, share = ops.project(y, self.qkv, self.gate, self.step, self.share)
        mixed = ops.causal_conv(mixed, self.kernel, step.states, self.place, step.batch, silu=True)
        seen = ops.gated_delta(mixed, time, share, self.net, step.states, self.place, step.batch)
        return ops.project(ops.sigmoid_mul(gate, ops.rms_norm(seen, self.head_norm)), self.output)[0]


@dataclass(frozen=True)
class Layer:
    """Two halves, each between its gates."""

    ngrams: NGramLayer | None
    first_gates: Gates
    first: Half
    second_gates: Gates
    second: GatedExperts


@dataclass(frozen=True)
class Qwen4ExpModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    num_streams: int
    layers: Sequence[Layer]
    last: StreamReader
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: CacheSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """What the head reads of the streams of `batch.logit_rows`: [rows, hidden]."""
        ops, (kv, index_keys, states, *ngram_states) = self.ops, cache
        streams = ops.open_streams(ops.embed(self.embedding, batch.input_ids), self.num_streams)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        step = Step(batch, angles, kv, index_keys, states)
        for layer in self.layers:
            if layer.ngrams is not None:
                streams = layer.ngrams.add_to(streams, ops, batch, *ngram_states)
            y, gates = layer.first_gates.read(streams, ops)
            streams = ops.add_gated(streams, gates, layer.first.of(y, ops, step))
            y, gates = layer.second_gates.read(streams, ops)
            streams = ops.add_gated(streams, gates, layer.second.of(y, ops))
        return self.last.read(ops.take(streams, batch.logit_rows), ops)[0]

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class Qwen4ExpFamily:
    """How a qwen4exp header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=(HYBRID_OPS - {"attention"}) | GATED_EXPERTS_OPS | GATED_STREAMS_OPS | NGRAM_OPS | INDEXED_OPS
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        shape = replace(shape, ngrams=with_rows_of(shape.ngrams, checkpoint))
        return dense_unmet(checkpoint, header, shape.hybrid.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Qwen4ExpModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        dense = shape.hybrid.dense
        bind = Binder(checkpoint, ops, dense.eps)
        embedding = bind.matrix("token_embd.weight")
        inv_freq = ops.load_vector(inverse_frequencies(dense.rope))
        return Qwen4ExpModel(
            ops=ops,
            embedding=embedding,
            num_streams=shape.num_streams,
            layers=[bind_layer(bind, shape, number, inv_freq) for number in range(dense.num_layers)],
            last=bind_reader(bind, "output_hc_", shape.num_streams, dense.hidden),
            head=bind.head(embedding),
            inv_freq=inv_freq,
            rope_magnitude=rope_magnitude(dense.rope),
            kv_spec=shape.cache,
            vocab_size=dense.vocab_size,
        )


def bind_layer(bind: Binder, shape: Qwen4ExpShape, number: int, inv_freq: Tensor) -> Layer:
    """One block's weights."""
    block, hidden = f"blk.{number}.", shape.hybrid.dense.hidden
    has_ngrams = shape.ngrams is not None and shape.ngrams.layer == number
    is_recurrent = shape.hybrid.is_recurrent[number]
    first = (
        bind_delta(bind, shape, number)
        if is_recurrent
        else bind_indexed(bind, shape.hybrid, shape.index, number, inv_freq)
    )
    return Layer(
        ngrams=bind_ngrams(bind, shape.ngrams, hidden) if has_ngrams and shape.ngrams is not None else None,
        first_gates=bind_gates(bind, f"{block}hc_attn_", shape.num_streams, hidden),
        first=first,
        second_gates=bind_gates(bind, f"{block}hc_ffn_", shape.num_streams, hidden),
        second=bind_gated_experts(bind, block, shape.experts),
    )


def bind_delta(bind: Binder, shape: Qwen4ExpShape, number: int) -> SigmoidDelta:
    """The weights of a recurrent layer, heads as they are stored."""
    block, hybrid = f"blk.{number}.", shape.hybrid
    rate, time_bias = bind.vector(f"{block}ssm_a"), bind.vector(f"{block}ssm_dt.bias")
    sizes = hybrid.num_key_heads, hybrid.num_value_heads, hybrid.key_dim, hybrid.value_dim
    return SigmoidDelta(
        qkv=bind.projection(f"{block}attn_qkv"),
        gate=bind.projection(f"{block}attn_gate"),
        step=bind.projection(f"{block}ssm_alpha"),
        share=bind.projection(f"{block}ssm_beta"),
        kernel=bind.vector(f"{block}ssm_conv1d.weight"),
        net=DeltaNet(*sizes, is_tiled=True, rate=rate, time_bias=time_bias),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=hybrid.place(number),
    )


FAMILY = Qwen4ExpFamily()
