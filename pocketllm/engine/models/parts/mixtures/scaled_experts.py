"""A feed-forward of experts beside one that every token uses, each with norms of its own, as in Gemma 4's mixture.

A router reads the row under a norm of its own, and what an expert gives is scaled by a number that it has learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing, ScaledExperts
from pocketllm.engine.backends.api.ops import Norm, Ops, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.header import HeaderReader

SCALED_EXPERTS_OPS = frozenset({"load_experts", "scaled_mixture"})
JOINED = "ffn_gate_up_exps.weight"


@dataclass(frozen=True)
class ScaledExpertsShape:
    """Sizes of a layer's experts."""

    num_experts: int
    num_used: int
    intermediate: int
    """Of each expert."""

    def tensors(self, hidden: int) -> tuple[Shapes, Shapes]:
        """Of a layer by the last parts of their names: those it needs, and those it may have."""
        return {
            "ffn_gate_inp.weight": (self.num_experts, hidden),
            "ffn_gate_inp.scale": (hidden,),
            JOINED: (self.num_experts, 2 * self.intermediate, hidden),
            "ffn_down_exps.weight": (self.num_experts, hidden, self.intermediate),
            **{f"{name}.weight": (hidden,) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")},
        }, {"ffn_down_exps.scale": (self.num_experts,)}


def read_scaled_experts(header: HeaderReader) -> ScaledExpertsShape | None:
    """None where there are no experts; what cannot be read becomes one of the header's problems."""
    if not header.count_or_none("expert_count"):
        return None
    num_experts, num_used = header.count("expert_count"), header.count("expert_used_count")
    if num_used > num_experts:
        header.problems.append(
            f"metadata key {header.architecture}.expert_used_count is {num_used}: there are only {num_experts} experts"
        )
    return ScaledExpertsShape(num_experts, num_used, header.count("expert_feed_forward_length"))


def with_halves_as_named(tensors: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """The same shapes, where a file has the halves of `ffn_gate_up_exps` in two tensors."""
    found: Shapes = {}
    for name, sizes in shapes.items():
        gate = name.replace("gate_up", "gate")
        if name.endswith(f".{JOINED}") and gate in tensors:
            experts, rows, hidden = sizes
            found |= dict.fromkeys((gate, name.replace("gate_up", "up")), (experts, rows // 2, hidden))
        else:
            found[name] = sizes
    return found


@dataclass(frozen=True)
class ScaledMixture:
    """What stands beside a layer's own feed-forward."""

    shared_norm: Norm
    """Of what that gives."""
    router_norm: Norm
    before: Norm
    experts: ScaledExperts
    after: Norm

    def beside(self, shared: Tensor, x: Tensor, ops: Ops) -> Tensor:
        """norm(shared) + norm(mixture(norm(x))). shared: what the feed-forward made of x; x: not normed."""
        routed = ops.scaled_mixture(ops.rms_norm(x, self.before), ops.rms_norm(x, self.router_norm), self.experts)
        return ops.add(ops.rms_norm(shared, self.shared_norm), ops.rms_norm(routed, self.after))


def bind_scaled_mixture(bind: Binder, block: str, shape: ScaledExpertsShape) -> ScaledMixture:
    """The experts of a block such as `blk.0.`; the router's norm takes its scale, over the root of the row's width."""
    scale, width = f"{block}ffn_down_exps.scale", bind.checkpoint.tensors[f"{block}ffn_gate_inp.weight"].shape[-1]
    ones = np.ones(shape.num_experts, np.float32)
    router = bind.checkpoint.values(f"{block}ffn_gate_inp.scale") * np.float32(width**-0.5)
    gate, up = bind_opening(bind, block, shape)
    return ScaledMixture(
        shared_norm=bind.norm(f"{block}post_ffw_norm_1"),
        router_norm=Norm(bind.ops.load_vector(router), bind.eps),
        before=bind.norm(f"{block}pre_ffw_norm_2"),
        experts=ScaledExperts(
            experts=Experts(
                router=bind.router(block),
                gate=gate,
                up=up,
                down=bind.experts(f"{block}ffn_down_exps"),
                routing=Routing(shape.num_used, Gating.SOFTMAX, normalized=True),
            ),
            scale=bind.ops.load_vector(bind.checkpoint.values(scale) if scale in bind.checkpoint.tensors else ones),
        ),
        after=bind.norm(f"{block}post_ffw_norm_2"),
    )


def bind_opening(bind: Binder, block: str, shape: ScaledExpertsShape) -> tuple[Any, Any]:
    """Gates and what they open, of all experts: rows of one tensor, as they are packed, or two tensors."""
    tensor = bind.checkpoint.tensors.get(f"{block}{JOINED}")
    if tensor is None:
        return bind.experts(f"{block}ffn_gate_exps"), bind.experts(f"{block}ffn_up_exps")
    rows = bind.checkpoint.data(f"{block}{JOINED}").reshape(shape.num_experts, 2, -1)
    sizes = (shape.num_experts, shape.intermediate, tensor.shape[-1])
    halves = (np.ascontiguousarray(rows[:, half]).reshape(-1) for half in (0, 1))
    gate, up = (bind.ops.load_experts(half, tensor.quant_type, sizes) for half in halves)
    return gate, up
