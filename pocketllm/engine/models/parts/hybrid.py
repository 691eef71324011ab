"""What qwen3next, qwen35 and qwen35moe share: gated attention every few layers, and Gated DeltaNet layers between.

Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464); Qiu et al. 2025, "Gated Attention for Large Language
Models" (arXiv 2505.06708). The feed-forward of a layer, and how its heads are laid out in the file, are the family's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import (
    KVCache,
    Norm,
    Ops,
    Projection,
    RopeLayout,
    States,
    Tensor,
    Weight,
)
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.models.blocks import DENSE_OPS, Binder, DenseShape, Shapes, read_dense_shape, weights_of_all
from pocketllm.engine.models.contract import CacheSpec, FeedForward, KVSpec, SeveralCaches, StateSpec
from pocketllm.engine.models.header import HeaderReader, is_list, short
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

HYBRID_OPS = DENSE_OPS | {"new_states", "copy_states", "causal_conv", "gated_delta", "silu_mul", "sigmoid_mul"}
INTERVAL = 4
"""Every how many layers one has attention, where the header does not say."""
Rows = npt.NDArray[np.intp]


# -- sizes -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HybridShape:
    """A plain decoder's sizes, which of its layers are recurrent, and those of a Gated DeltaNet layer."""

    dense: DenseShape
    is_recurrent: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Of the causal convolution."""

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of all heads, which go through the convolution together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def caches(self) -> tuple[KVSpec, StateSpec]:
        """Keys and values of the layers with attention, and states of the others."""
        dense, num_recurrent = self.dense, sum(self.is_recurrent)
        kv = KVSpec(dense.num_layers - num_recurrent, dense.num_kv_heads, dense.head_dim, dense.head_dim)
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return kv, StateSpec(num_recurrent, conv=(self.taps - 1, self.num_channels), delta=matrices)

    @property
    def cache(self) -> CacheSpec:
        """Both, side by side."""
        return SeveralCaches(self.caches)

    def place(self, layer: int) -> int:
        """Which of its own kind a layer is: the index of its cache."""
        return self.is_recurrent[:layer].count(self.is_recurrent[layer])


def read_hybrid_shape(header: HeaderReader, vocab_size: int, intermediate: int | None = None) -> HybridShape:
    """Sizes from the header; intermediate: of a feed-forward where the header need not say."""
    dense = read_dense_shape(header, vocab_size, intermediate)
    num_key_heads, num_value_heads = header.count("ssm.group_count"), header.count("ssm.time_step_rank")
    inner = header.count("ssm.inner_size")
    for what, number, of in (
        ("ssm.inner_size", inner, num_value_heads),
        ("ssm.time_step_rank", num_value_heads, num_key_heads),
    ):
        if number % of:
            header.problems.append(f"metadata key {header.architecture}.{what} is {number}: it must divide by {of}")
    return HybridShape(
        dense=dense,
        is_recurrent=read_kinds(header, dense.num_layers),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=header.count("ssm.state_size"),
        value_dim=inner // num_value_heads,
        taps=header.count("ssm.conv_kernel"),
    )


def read_kinds(header: HeaderReader, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it is recurrent: one by one, or all but every so many-th."""
    name = f"{header.architecture}.attention.recurrent_layers"
    listed = header.metadata.get(name)
    own = header.of_layers(listed, num_layers) if is_list(listed) else ()
    if listed is None:
        interval = header.count("full_attention_interval", INTERVAL)
        kinds = [(layer + 1) % interval != 0 for layer in range(min(num_layers, MOST_LAYERS))]
    elif len(own) == num_layers and all(flag in (0, 1) for flag in own):
        kinds = [bool(flag) for flag in own]
    else:
        header.problems.append(f"metadata key {name} is {short(listed)}: it must say true or false for each layer")
        return (False,)
    if all(kinds):
        header.problems.append(f"all {len(kinds)} layers of the {header.architecture} are recurrent: one must not be")
    return tuple(kinds)


MOST_LAYERS = 1 << 16
"""A count above it is refused later, by the number of tensors, and must not be counted up to here."""


# -- tensors ---------------------------------------------------------------------------------------------------------
def hybrid_shapes(shape: HybridShape, steps: Shapes, feed_forward: Shapes) -> Shapes:
    """All tensors but a head of its own. steps: a recurrent layer's matrices of time steps and shares."""
    dense, inner = shape.dense, shape.num_value_heads * shape.value_dim
    query, key = dense.num_heads * dense.head_dim, dense.num_kv_heads * dense.head_dim
    attention: Shapes = {
        "attn_q.weight": (2 * query, dense.hidden),
        "attn_k.weight": (key, dense.hidden),
        "attn_v.weight": (key, dense.hidden),
        "attn_output.weight": (dense.hidden, query),
        "attn_q_norm.weight": (dense.head_dim,),
        "attn_k_norm.weight": (dense.head_dim,),
    }
    recurrent: Shapes = {
        "attn_qkv.weight": (shape.num_channels, dense.hidden),
        "attn_gate.weight": (inner, dense.hidden),
        "ssm_conv1d.weight": (shape.num_channels, shape.taps),
        "ssm_a": (shape.num_value_heads,),
        "ssm_dt.bias": (shape.num_value_heads,),
        "ssm_norm.weight": (shape.value_dim,),
        "ssm_out.weight": (dense.hidden, inner),
        **steps,
    }
    norms: Shapes = dict.fromkeys(("attn_norm", "post_attention_norm"), (dense.hidden,))
    needed = weights_of_all(dense, norms | feed_forward)
    for number, is_recurrent in enumerate(shape.is_recurrent):
        needed |= {f"blk.{number}.{name}": rows for name, rows in (recurrent if is_recurrent else attention).items()}
    return needed


def step_shapes(shape: HybridShape) -> Shapes:
    """A recurrent layer's matrices of time steps and of shares, where they are two."""
    logits = (shape.num_value_heads, shape.dense.hidden)
    return {"ssm_alpha.weight": logits, "ssm_beta.weight": logits}


# -- layers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """What the layers of one forward pass share."""

    batch: ForwardBatch
    angles: Tensor
    kv: KVCache
    states: States


class Part(Protocol):
    """The first half of a layer."""

    def add_to(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        """x and what the half makes of it: [tokens, hidden] → the same."""


@dataclass(frozen=True)
class GatedAttention:
    """Attention with normed heads, part of which rotate, and a sigmoid gate on what it gives."""

    norm: Norm
    q: Projection
    gate: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    k_norm: Norm
    output: Projection
    spec: AttentionSpec
    place: int

    def add_to(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        q, gate, k, v = ops.project(x, self.q, self.gate, self.k, self.v, norm=self.norm)
        q = ops.rope(ops.rms_norm(q, self.q_norm), step.angles, self.spec.head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, self.k_norm), step.angles, self.spec.head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(step.kv, self.place, k, v, step.batch)
        seen = ops.attention(q, step.kv, self.place, step.batch, self.spec)
        return ops.project_add(ops.sigmoid_mul(gate, seen), self.output, x)


@dataclass(frozen=True)
class DeltaLayer:
    """Gated DeltaNet: a short convolution, the gated delta rule, and a norm of each head under a silu gate."""

    norm: Norm
    qkv: Projection
    gate: Projection
    step: Projection
    share: Projection
    kernel: Tensor
    net: DeltaNet
    head_norm: Norm
    output: Projection
    place: int

    def add_to(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        mixed, gate, time, share = ops.project(x, self.qkv, self.gate, self.step, self.share, norm=self.norm)
        mixed = ops.causal_conv(mixed, self.kernel, step.states, self.place, step.batch, silu=True)
        seen = ops.gated_delta(mixed, time, share, self.net, step.states, self.place, step.batch)
        return ops.project_add(ops.silu_mul(gate, ops.rms_norm(seen, self.head_norm)), self.output, x)


@dataclass(frozen=True)
class HybridModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    layers: Sequence[tuple[Part, FeedForward]]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: CacheSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops, (kv, states) = self.ops, cache
        x = ops.embed(self.embedding, batch.input_ids)
        step = Step(batch, ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude), kv, states)
        for part, feed_forward in self.layers:
            x = feed_forward.add_to(part.add_to(x, ops, step), ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


# -- binding ---------------------------------------------------------------------------------------------------------
def bind_model(
    bind: Binder,
    shape: HybridShape,
    recurrent: Callable[[int], Part],
    feed_forward: Callable[[str], FeedForward],
) -> HybridModel:
    """recurrent: binds the first half of a recurrent layer; feed_forward: the second half of a block (`blk.0.`)."""
    dense, ops = shape.dense, bind.ops
    embedding = bind.matrix("token_embd.weight")
    layers = [
        (recurrent(number) if is_recurrent else bind_attention(bind, shape, number), feed_forward(f"blk.{number}."))
        for number, is_recurrent in enumerate(shape.is_recurrent)
    ]
    return HybridModel(
        ops=ops,
        embedding=embedding,
        layers=layers,
        output_norm=bind.norm("output_norm"),
        head=bind.head(embedding),
        inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
        rope_magnitude=rope_magnitude(dense.rope),
        kv_spec=shape.cache,
        vocab_size=dense.vocab_size,
    )


def bind_attention(bind: Binder, shape: HybridShape, number: int) -> GatedAttention:
    """The weights of a layer with attention; a head's rows of `attn_q` are its query's, then its gate's."""
    block, dense = f"blk.{number}.", shape.dense
    by_head = np.arange(2 * dense.num_heads * dense.head_dim).reshape(dense.num_heads, 2, dense.head_dim)
    q, gate = bind.rows(f"{block}attn_q", by_head[:, 0], by_head[:, 1])
    return GatedAttention(
        norm=bind.norm(f"{block}attn_norm"),
        q=q,
        gate=gate,
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        output=bind.projection(f"{block}attn_output"),
        spec=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.head_dim**-0.5),
        place=shape.place(number),
    )


def bind_tiled_delta(bind: Binder, shape: HybridShape, number: int) -> DeltaLayer:
    """The weights of a recurrent layer whose value heads are stored tiled: head j reads key head j mod their number."""
    block = f"blk.{number}."
    return DeltaLayer(
        norm=bind.norm(f"{block}attn_norm"),
        qkv=bind.projection(f"{block}attn_qkv"),
        gate=bind.projection(f"{block}attn_gate"),
        step=bind.projection(f"{block}ssm_alpha"),
        share=bind.projection(f"{block}ssm_beta"),
        kernel=bind.vector(f"{block}ssm_conv1d.weight"),
        net=DeltaNet(
            num_key_heads=shape.num_key_heads,
            num_value_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            is_tiled=True,
            rate=bind.vector(f"{block}ssm_a"),
            time_bias=bind.vector(f"{block}ssm_dt.bias"),
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=shape.place(number),
    )
