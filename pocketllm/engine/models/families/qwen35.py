"""qwen35: Gated DeltaNet and gated attention in turns, and a gated feed-forward in every layer. Ternary-Bonsai is one.

Qwen Team 2026, "Qwen3.5". Norms are stored with their 1 added, but for the one within a DeltaNet head; value heads are
stored tiled: head j reads key head j mod the number of key heads. Its three rotary axes are one where there is only
text. A checkpoint may be folded (`models.folding`), and the input of `ssm_out` is then ordered by key head.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    SwiGLU,
    context_length,
    dense_unmet,
    gated_matrices,
    own_head,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.folding import Folding, folded_binder, folding_problems, read_folding
from pocketllm.engine.models.parts.hybrid import (
    HYBRID_OPS,
    DeltaLayer,
    HybridModel,
    HybridShape,
    Rows,
    bind_model,
    bind_tiled_delta,
    hybrid_shapes,
    read_hybrid_shape,
    step_shapes,
)

ARCHITECTURE = "qwen35"


def read_shape(header: HeaderReader, vocab_size: int = 0) -> HybridShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    return read_hybrid_shape(header, vocab_size)


def tensor_shapes(shape: HybridShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    return hybrid_shapes(shape, step_shapes(shape), gated_matrices(shape.dense)), own_head(shape.dense)


def bind_feed_forward(bind: Binder, block: str) -> SwiGLU:
    """The feed-forward of a block such as `blk.0.`."""
    return SwiGLU(
        norm=bind.norm(f"{block}post_attention_norm"),
        gate=bind.projection(f"{block}ffn_gate"),
        up=bind.projection(f"{block}ffn_up"),
        down=bind.projection(f"{block}ffn_down"),
    )


def bind_grouped_delta(bind: Binder, shape: HybridShape, number: int) -> DeltaLayer:
    """The weights of a recurrent layer with its heads put in the order of `ssm_out`'s input: by key head."""
    block, heads, values = f"blk.{number}.", heads_by_key_head(shape), value_rows(shape)
    keys = 2 * shape.num_key_heads * shape.key_dim
    channels = np.concatenate([np.arange(keys), keys + values])
    ops, checkpoint = bind.ops, bind.checkpoint
    return DeltaLayer(
        norm=bind.norm(f"{block}attn_norm"),
        qkv=bind.rows(f"{block}attn_qkv", channels)[0],
        gate=bind.rows(f"{block}attn_gate", values)[0],
        step=bind.rows(f"{block}ssm_alpha", heads)[0],
        share=bind.rows(f"{block}ssm_beta", heads)[0],
        kernel=ops.load_vector(checkpoint.values(f"{block}ssm_conv1d.weight")[channels]),
        net=DeltaNet(
            num_key_heads=shape.num_key_heads,
            num_value_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            is_tiled=False,
            rate=ops.load_vector(checkpoint.values(f"{block}ssm_a")[heads]),
            time_bias=ops.load_vector(checkpoint.values(f"{block}ssm_dt.bias")[heads]),
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=shape.place(number),
    )


def heads_by_key_head(shape: HybridShape) -> Rows:
    """Stored (tiled) value heads, those of the first key head first."""
    return np.arange(shape.num_value_heads).reshape(-1, shape.num_key_heads).T.ravel()


def value_rows(shape: HybridShape) -> Rows:
    """The same for each value of a head."""
    return (heads_by_key_head(shape)[:, None] * shape.value_dim + np.arange(shape.value_dim)).ravel()


class Qwen35Family:
    """How a qwen35 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=HYBRID_OPS | {"hadamard"})

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        reasons = dense_unmet(checkpoint, header, shape.dense, NEUTRAL_KEYS, lambda: tensor_shapes(shape))
        return [*reasons, *folding_problems(checkpoint.metadata, checkpoint.tensors)]

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> HybridModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.dense.eps)
        folding = read_folding(checkpoint.metadata)
        if folding is not None:
            bind = folded_binder(bind, folding)
        bind_recurrent = bind_grouped_delta if is_grouped(folding) else bind_tiled_delta
        return bind_model(
            bind,
            shape,
            recurrent=lambda number: bind_recurrent(bind, shape, number),
            feed_forward=lambda block: bind_feed_forward(bind, block),
        )


def is_grouped(folding: Folding | None) -> bool:
    """Whether `ssm_out` reads its heads in another order than the file stores them."""
    return folding is not None and folding.is_grouped


FAMILY = Qwen35Family()
