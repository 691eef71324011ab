"""What lfm2 and lfm2moe share: gated short convolutions, and attention in some layers.

Liquid AI 2025, "LFM2 Technical Report" (arXiv 2511.23404). A layer is a convolution where its number of key heads is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    own_head,
    read_dense_shape,
    weights_of_all,
)
from pocketllm.engine.models.contract import CacheSpec, FeedForward, KVSpec, SeveralCaches, StateSpec
from pocketllm.engine.models.header import HeaderReader, is_list, short
from pocketllm.engine.models.parts.attention.normed_heads import NormedAttention, bind_attention
from pocketllm.engine.models.parts.hybrid import HybridModel, Part, Step
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

SHORT_CONV_OPS = DENSE_OPS | {"new_states", "copy_states", "causal_conv", "mul", "silu_mul"}


@dataclass(frozen=True)
class ShortConvShape:
    """A plain decoder's sizes, and which of its layers are convolutions of how many taps."""

    dense: DenseShape
    is_conv: tuple[bool, ...]
    taps: int

    @property
    def cache(self) -> CacheSpec:
        """Keys and values of the layers with attention, and the last inputs of the others."""
        dense, num_conv = self.dense, sum(self.is_conv)
        return SeveralCaches(
            (
                KVSpec(dense.num_layers - num_conv, dense.num_kv_heads, dense.head_dim, dense.head_dim),
                StateSpec(num_conv, conv=(self.taps - 1, dense.hidden)),
            )
        )

    def place(self, layer: int) -> int:
        """Which of its own kind a layer is: the index of its cache."""
        return self.is_conv[:layer].count(self.is_conv[layer])


def read_short_conv_shape(header: HeaderReader, vocab_size: int) -> ShortConvShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    name = f"{header.architecture}.attention.head_count_kv"
    heads = header.metadata.get(name)
    if is_list(heads):
        heads = header.of_layers(heads, HeaderReader(header.metadata, header.architecture).num_layers())
    if not is_list(heads) or len(set(heads) - {0}) != 1:
        header.problems.append(
            f"metadata key {name} is {short(heads)}: it must give each layer's key heads, 0 for a convolution and one "
            "number for all others"
        )
        heads = [1]
    counted = HeaderReader({**header.metadata, name: max(heads)}, header.architecture)
    dense = read_dense_shape(counted, vocab_size)
    header.problems += counted.problems
    if len(heads) != dense.num_layers and not header.problems:
        header.problems.append(f"metadata key {name} has {len(heads)} entries for {dense.num_layers} layers")
    return ShortConvShape(dense, tuple(count == 0 for count in heads), header.count("shortconv.l_cache"))


def short_conv_shapes(shape: ShortConvShape, feed_forward: Callable[[int], Shapes]) -> tuple[Shapes, Shapes]:
    """Tensors that a checkpoint needs, and those it may have. feed_forward: of a layer, by name without `.weight`."""
    dense = shape.dense
    conv: Shapes = {
        "shortconv.in_proj": (3 * dense.hidden, dense.hidden),
        "shortconv.conv": (dense.hidden, shape.taps),
        "shortconv.out_proj": (dense.hidden, dense.hidden),
    }
    heads: Shapes = {"attn_q_norm": (dense.head_dim,), "attn_k_norm": (dense.head_dim,)}
    attention = heads | attention_matrices(dense)
    needed = weights_of_all(dense, dict.fromkeys(("attn_norm", "ffn_norm"), (dense.hidden,)))
    needed["token_embd_norm.weight"] = needed.pop("output_norm.weight")
    for number, is_conv in enumerate(shape.is_conv):
        layer = (conv if is_conv else attention) | feed_forward(number)
        needed |= {f"blk.{number}.{name}.weight": rows for name, rows in layer.items()}
    return needed, own_head(dense)


@dataclass(frozen=True)
class ShortConv:
    """out(c · conv(b · x)): a causal convolution between two gates that its own input makes."""

    norm: Norm
    before: Projection
    after: Projection
    value: Projection
    kernel: Tensor
    output: Projection
    place: int

    def add_to(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        before, after, value = ops.project(x, self.before, self.after, self.value, norm=self.norm)
        gated = ops.mul(before, value)
        mixed = ops.causal_conv(gated, self.kernel, step.states, self.place, step.batch, silu=False)
        return ops.project_add(ops.mul(after, mixed), self.output, x)


@dataclass(frozen=True)
class Attending:
    """A layer with attention."""

    attention: NormedAttention

    def add_to(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        return self.attention.add_to(x, ops, step.angles, step.batch, step.kv)


def bind_short_conv_model(
    bind: Binder, shape: ShortConvShape, feed_forward: Callable[[int], FeedForward]
) -> HybridModel:
    """feed_forward: binds the second half of a layer."""
    dense, ops = shape.dense, bind.ops
    embedding = bind.matrix("token_embd.weight")
    return HybridModel(
        ops=ops,
        embedding=embedding,
        layers=[(bind_part(bind, shape, number), feed_forward(number)) for number in range(dense.num_layers)],
        output_norm=bind.norm("token_embd_norm"),
        head=bind.head(embedding),
        inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
        rope_magnitude=rope_magnitude(dense.rope),
        kv_spec=shape.cache,
        vocab_size=dense.vocab_size,
    )


def bind_part(bind: Binder, shape: ShortConvShape, number: int) -> Part:
    """The first half of a layer; the rows of `in_proj` are the gate before, the gate after, and the value."""
    block, dense = f"blk.{number}.", shape.dense
    if shape.is_conv[number]:
        before, after, value = bind.rows(f"{block}shortconv.in_proj", *np.arange(3 * dense.hidden).reshape(3, -1))
        return ShortConv(
            norm=bind.norm(f"{block}attn_norm"),
            before=before,
            after=after,
            value=value,
            kernel=bind.vector(f"{block}shortconv.conv.weight"),
            output=bind.projection(f"{block}shortconv.out_proj"),
            place=shape.place(number),
        )
    return Attending(bind_attention(bind, dense, block, shape.place(number)))
