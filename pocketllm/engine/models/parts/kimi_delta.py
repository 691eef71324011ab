"""Kimi Delta Attention: a short convolution of queries, keys and values, a delta rule whose decay is a vector, a gate.

Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692). Decays and gates are made through a waist as narrow as a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, States, Tensor
from pocketllm.engine.backends.api.recurrent import KimiDelta
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.contract import StateSpec
from pocketllm.engine.models.header import HeaderReader, short

KIMI_DELTA_OPS = frozenset({"new_states", "copy_states", "causal_conv", "kimi_delta", "rms_norm", "sigmoid_mul"})


@dataclass(frozen=True)
class KimiDeltaShape:
    """Sizes of a layer."""

    num_heads: int
    dim: int
    """Of a head."""
    taps: int
    """Of the causal convolutions."""
    lower_bound: float | None

    @property
    def width(self) -> int:
        """Of all heads."""
        return self.num_heads * self.dim

    def states(self, num_layers: int) -> tuple[StateSpec, StateSpec, StateSpec]:
        """What the convolutions of queries, keys and values look back on; the delta rule's matrices with the first."""
        rows = (self.taps - 1, self.width)
        plain = StateSpec(num_layers, rows)
        return StateSpec(num_layers, rows, (self.num_heads, self.dim, self.dim)), plain, plain

    def tensors(self, hidden: int) -> Shapes:
        """By the last parts of their names."""
        names: Shapes = {
            **{f"attn_{part}.weight": (self.width, hidden) for part in "qkv"},
            **{f"ssm_conv1d_{part}.weight": (1, self.width, 1, self.taps) for part in "qkv"},
            **{f"ssm_{part}_a.weight": (self.dim, hidden) for part in "fg"},
            **{f"ssm_{part}_b.weight": (self.width, self.dim) for part in "fg"},
        }
        return names | {
            "ssm_beta.weight": (self.num_heads, hidden),
            "ssm_a": (self.num_heads,),
            "ssm_dt.bias": (self.width,),
            "ssm_norm.weight": (self.dim,),
            "attn_output.weight": (hidden, self.width),
        }


def read_kimi_delta(header: HeaderReader) -> KimiDeltaShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    return KimiDeltaShape(
        num_heads=header.one_count("attention.head_count"),
        dim=header.count("kda.head_dim"),
        taps=header.count("ssm.conv_kernel"),
        lower_bound=read_lower_bound(header),
    )


def read_lower_bound(header: HeaderReader) -> float | None:
    """`kda.gate_lower_bound`, a number below 0; None where it is absent."""
    name = f"{header.architecture}.kda.gate_lower_bound"
    bound = header.metadata.get(name)
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -np.inf < bound < 0:
        header.problems.append(f"metadata key {name} is {short(bound)}: it must be a number below 0")
        return None
    return float(bound)


def with_kernels_as_named(tensors: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """The same shapes, kernels with as many sizes of 1 as their tensors have: converters differ in that alone."""

    def seen(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if ".ssm_conv1d_" not in name or name not in tensors:
            return shape
        own = tuple(tensors[name].shape)
        return own if [size for size in own if size > 1] == [size for size in shape if size > 1] else shape

    return {name: seen(name, shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class KimiDeltaLayer:
    """One layer's weights."""

    q: Projection
    k: Projection
    v: Projection
    kernels: tuple[Tensor, Tensor, Tensor]
    """Of queries, keys and values: [heads * dim, taps]."""
    step_waist: Projection
    step: Projection
    share: Projection
    gate_waist: Projection
    gate: Projection
    net: KimiDelta
    head_norm: Norm
    output: Projection
    place: int

    def of(self, y: Tensor, ops: Ops, batch: ForwardBatch, states: tuple[States, States, States]) -> Tensor:
        """What the layer makes of normed rows: [tokens, hidden] → the same; states: as `KimiDeltaShape.states` has."""
        parts = (self.q, self.k, self.v, self.step_waist, self.share, self.gate_waist)
        *plain, step, share, gate = ops.project(y, *parts)
        q, k, v = (
            ops.causal_conv(part, kernel, kept, self.place, batch, silu=True)
            for part, kernel, kept in zip(plain, self.kernels, states, strict=True)
        )
        [step], [gate] = ops.project(step, self.step), ops.project(gate, self.gate)
        seen = ops.kimi_delta(q, k, v, step, share, self.net, states[0], self.place, batch)
        return ops.project(ops.sigmoid_mul(gate, ops.rms_norm(seen, self.head_norm)), self.output)[0]


def bind_kimi_delta(bind: Binder, block: str, shape: KimiDeltaShape, place: int) -> KimiDeltaLayer:
    """The layer of a block such as `blk.0.`; place: which of its kind it is."""
    q, k, v = (bind.projection(f"{block}attn_{part}") for part in "qkv")
    kernels = (bind.checkpoint.values(f"{block}ssm_conv1d_{part}.weight") for part in "qkv")
    q_kernel, k_kernel, v_kernel = (bind.ops.load_vector(kernel.reshape(shape.width, -1)) for kernel in kernels)
    return KimiDeltaLayer(
        q=q,
        k=k,
        v=v,
        kernels=(q_kernel, k_kernel, v_kernel),
        step_waist=bind.projection(f"{block}ssm_f_a"),
        step=bind.projection(f"{block}ssm_f_b"),
        share=bind.projection(f"{block}ssm_beta"),
        gate_waist=bind.projection(f"{block}ssm_g_a"),
        gate=bind.projection(f"{block}ssm_g_b"),
        net=KimiDelta(
            num_heads=shape.num_heads,
            dim=shape.dim,
            rate=bind.vector(f"{block}ssm_a"),
            time_bias=bind.vector(f"{block}ssm_dt.bias"),
            lower_bound=shape.lower_bound,
        ),
        head_norm=bind.norm(f"{block}ssm_norm"),
        output=bind.projection(f"{block}attn_output"),
        place=place,
    )
