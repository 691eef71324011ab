"""minimax-m2: grouped attention whose queries and keys are normed as whole rows, and experts in every layer.

MiniMax 2025, the configuration and model card of MiniMax-M2. Experts are chosen by sigmoid with a bias that does not
weigh, and their weights normalized; no expert is shared. The two halves of a head's rotated values rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    attention_matrices,
    bad_geometry,
    context_length,
    family_unmet,
    own_head,
    read_dense_shape,
    usable,
    vocab_rows,
    weights_of_all,
)
from pocketllm.engine.models.contract import Checkpoint, KVSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader, misfit
from pocketllm.engine.models.parts.experts import (
    MIXTURE_OPS,
    Mixture,
    MixtureShape,
    bind_mixture,
    mixture_shapes,
    read_mixture,
)
from pocketllm.engine.models.rope import inverse_frequencies, rope_magnitude

ARCHITECTURE = "minimax-m2"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {
    "leading_dense_block_count": 0,
}


@dataclass(frozen=True)
class MiniMaxShape:
    """A plain decoder's sizes, its feed-forward's apart, and those of its experts."""

    dense: DenseShape
    mixture: MixtureShape


def read_shape(header: HeaderReader, vocab_size: int = 0) -> MiniMaxShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dense = read_dense_shape(header, vocab_size)
    return MiniMaxShape(dense, read_mixture(header, dense.hidden, normalized=True))


def tensor_shapes(shape: MiniMaxShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    dense = shape.dense
    matrices = attention_matrices(dense)
    norms: Shapes = {f"{name}_norm": matrices[name][:1] for name in ("attn_q", "attn_k")}
    needed = weights_of_all(dense, matrices | norms | {"attn_norm": (dense.hidden,)})
    optional = own_head(dense)
    experts, chosen = mixture_shapes(shape.mixture)
    for number in range(dense.num_layers):
        needed |= {f"blk.{number}.{name}": sizes for name, sizes in experts.items()}
        optional |= {f"blk.{number}.{name}": sizes for name, sizes in chosen.items()}
    return needed, optional


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    k_norm: Norm
    output: Projection
    feed_forward: Mixture


@dataclass(frozen=True)
class MiniMaxModel:
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
        q = ops.rope(ops.rms_norm(q, layer.q_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(ops.rms_norm(k, layer.k_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project_add(ops.attention(q, cache, number, batch, self.attention), layer.output, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class MiniMaxFamily:
    """How a minimax-m2 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=DENSE_OPS | MIXTURE_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        return usable(read_dense_shape, metadata, ARCHITECTURE).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return family_unmet(
            checkpoint,
            header,
            shape.dense.num_layers,
            NEUTRAL,
            lambda: [
                *bad_geometry(ARCHITECTURE, shape.dense, checkpoint.metadata),
                *misfit(checkpoint, *tensor_shapes(shape)),
            ],
        )

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> MiniMaxModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        dense = shape.dense
        bind = Binder(checkpoint, ops, dense.eps)
        embedding = bind.matrix("token_embd.weight")
        return MiniMaxModel(
            ops=ops,
            shape=dense,
            embedding=embedding,
            layers=[bind_layer(bind, f"blk.{number}.", shape.mixture) for number in range(dense.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(dense.rope)),
            rope_magnitude=rope_magnitude(dense.rope),
            attention=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.head_dim**-0.5),
            kv_spec=dense.kv,
            vocab_size=dense.vocab_size,
        )


def bind_layer(bind: Binder, block: str, mixture: MixtureShape) -> Layer:
    """The weights of a block such as `blk.0.`."""
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        output=bind.projection(f"{block}attn_output"),
        feed_forward=bind_mixture(bind, block, mixture),
    )


FAMILY = MiniMaxFamily()
