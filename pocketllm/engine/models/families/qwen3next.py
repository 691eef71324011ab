"""qwen3next: Gated DeltaNet and gated attention in turns, and a mixture of experts with a shared one in every layer.

Qwen Team 2025, "Qwen3-Next". Norms are stored with their 1 added, but for the one within a DeltaNet head; value heads
that share a key head are neighbors.
"""

import numpy as np

from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.parts.hybrid import DeltaLayer, HybridShape
from pocketllm.engine.models.parts.hybrid_mixture import (
    HybridMixtureShape,
    hybrid_mixture_family,
    read_hybrid_mixture,
)

ARCHITECTURE = "qwen3next"

read_shape = read_hybrid_mixture


def tensor_shapes(shape: HybridMixtureShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hybrid = shape.hybrid
    return shape.tensors({"ssm_ba.weight": (2 * hybrid.num_value_heads, hybrid.dense.hidden)})


def bind_delta(bind: Binder, shape: HybridShape, number: int) -> DeltaLayer:
    """The weights of a recurrent layer; a key head's rows of `ssm_ba` are its value heads' shares, then their steps."""
    block, heads = f"blk.{number}.", shape.num_value_heads
    by_key_head = np.arange(2 * heads).reshape(shape.num_key_heads, 2, heads // shape.num_key_heads)
    share, step = bind.rows(f"{block}ssm_ba", by_key_head[:, 0], by_key_head[:, 1])
    return DeltaLayer(
        norm=bind.norm(f"{block}attn_norm"),
        qkv=bind.projection(f"{block}attn_qkv"),
        gate=bind.projection(f"{block}attn_gate"),
        step=step,
        share=share,
        kernel=bind.vector(f"{block}ssm_conv1d.weight"),
        net=DeltaNet(
            num_key_heads=shape.num_key_heads,
            num_value_heads=heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            is_tiled=False,
            rate=bind.vector(f"{block}ssm_a"),
            time_bias=bind.vector(f"{block}ssm_dt.bias"),
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}ssm_out"),
        place=shape.place(number),
    )


FAMILY = hybrid_mixture_family(ARCHITECTURE, tensor_shapes, bind_delta)
