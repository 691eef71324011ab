"""gpt-oss: attention with a learned sink, local in every other layer, and biased experts behind a bounded gate.

OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925); the sink is a learned score of each head, after
Xiao et al. 2023 (arXiv 2309.17453). YaRN's ramp is not rounded to whole pairs; the halves of a head rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, Routing
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

ARCHITECTURE = "gpt-oss"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key not in ("expert_count", "attention.sliding_window")}
NEUTRAL |= {"expert_gating_func": 1, "expert_shared_count": 0, "expert_weights_scale": 1.0}
GATE_SLOPE, GATE_LIMIT = 1.702, 7.0
"""Of the experts' gate; no key tells them."""


@dataclass(frozen=True)
class GptOssShape:
    """A plain decoder's sizes, its windows, and its experts."""

    dense: DenseShape
    windows: Windows
    num_experts: int
    num_used: int
    intermediate: int
    """Of each expert."""

    @property
    def cache(self) -> SeveralCaches:
        return self.windows.caches(self.dense.kv)


def read_shape(header: HeaderReader, vocab_size: int = 0) -> GptOssShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_experts, num_used = header.count("expert_count"), header.count("expert_used_count")
    if num_used > num_experts:
        header.problems.append(
            f"metadata key {ARCHITECTURE}.expert_used_count is {num_used}: there are only {num_experts} experts"
        )
    intermediate = header.count("expert_feed_forward_length")
    dense = read_dense_shape(header, vocab_size, intermediate)
    return GptOssShape(
        dense=replace(dense, rope=replace(dense.rope, rounds_ramp=False)),
        windows=read_windows(header, dense.num_layers, period=2),
        num_experts=num_experts,
        num_used=num_used,
        intermediate=intermediate,
    )


def tensor_shapes(shape: GptOssShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    dense, inner = shape.dense, (shape.num_experts, shape.intermediate, shape.dense.hidden)
    attention = attention_matrices(dense)
    experts: Shapes = {
        "ffn_gate_inp": (shape.num_experts, dense.hidden),
        "ffn_gate_exps": inner,
        "ffn_up_exps": inner,
        "ffn_down_exps": (shape.num_experts, dense.hidden, shape.intermediate),
    }
    norms: Shapes = dict.fromkeys(("attn_norm", "post_attention_norm"), (dense.hidden,))
    needed = weights_of_all(dense, {**norms, "attn_sinks": (dense.num_heads,), **attention, **experts})
    for number in range(dense.num_layers):
        biased = {name: rows[:-1] for name, rows in (attention | experts).items()}
        needed |= {f"blk.{number}.{name}.bias": rows for name, rows in biased.items()}
    return needed, own_head(dense)


@dataclass(frozen=True)
class Layer:
    """One block's weights and what it sees."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    sinks: Tensor
    output: Projection
    ffn_norm: Norm
    experts: BoundedExperts
    attention: AttentionSpec
    place: int
    """Which layer of its cache it is."""


@dataclass(frozen=True)
class GptOssModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: SeveralCaches
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for layer in self.layers:
            x = self.attend(layer, x, angles, batch, cache[0 if layer.attention.window is None else -1])
            x = ops.add(x, ops.bounded_mixture(ops.rms_norm(x, layer.ffn_norm), layer.experts))
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(self, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The attention half of a block, cache written first, residual added: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, layer.attention.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        q = ops.rope(q, angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(k, angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, layer.place, k, v, batch)
        seen = ops.sink_attention(q, layer.sinks, cache, layer.place, batch, layer.attention)
        return ops.project_add(seen, layer.output, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class GptOssFamily:
    """How a gpt-oss header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=(DENSE_OPS - {"attention"}) | {"sink_attention", "load_experts", "bounded_mixture", "add"}
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> SeveralCaches:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, shape.dense, NEUTRAL, lambda: tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> GptOssModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        dense = shape.dense
        bind = Binder(checkpoint, ops, dense.eps)
        embedding = bind.matrix("token_embd.weight")
        return GptOssModel(
            ops=ops,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(dense.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
            rope_magnitude=rope_magnitude(dense.rope),
            kv_spec=shape.cache,
            vocab_size=dense.vocab_size,
        )


def bind_layer(bind: Binder, shape: GptOssShape, number: int) -> Layer:
    """One block's weights and what it sees."""
    block, dense = f"blk.{number}.", shape.dense
    scale, window = dense.head_dim**-0.5, shape.windows.of(number)
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        sinks=bind.vector(f"{block}attn_sinks.weight"),
        output=bind.projection(f"{block}attn_output"),
        ffn_norm=bind.norm(f"{block}post_attention_norm"),
        experts=BoundedExperts(
            experts=Experts(
                router=bind.router(block),
                gate=bind.experts(f"{block}ffn_gate_exps"),
                up=bind.experts(f"{block}ffn_up_exps"),
                down=bind.experts(f"{block}ffn_down_exps"),
                # a softmax over the experts used alone is the one over all, normalized over those
                routing=Routing(shape.num_used, Gating.SOFTMAX, normalized=True),
            ),
            gate_bias=bind.vector(f"{block}ffn_gate_exps.bias"),
            up_bias=bind.vector(f"{block}ffn_up_exps.bias"),
            down_bias=bind.vector(f"{block}ffn_down_exps.bias"),
            slope=GATE_SLOPE,
            limit=GATE_LIMIT,
        ),
        attention=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, scale, window=window),
        place=shape.windows.place(number),
    )


FAMILY = GptOssFamily()
