"""A mixture of experts as a header describes it, with the experts beside it that every token uses.

DeepSeek-AI 2024, "DeepSeekMoE" (arXiv 2401.06066) for shared experts; "DeepSeek-V3" (arXiv 2412.19437) for the bias
that chooses and does not weigh.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.header import HeaderReader, short, whole_number

GATINGS = {1: Gating.SOFTMAX, 2: Gating.SIGMOID}
"""By `expert_gating_func`."""
MIXTURE_OPS = frozenset({"load_experts", "mixture", "add", "silu_mul"})
"""Operations that a mixture needs, beside those of a plain decoder."""


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a layer's experts, and how a token finds its own."""

    hidden: int
    num_experts: int
    num_used: int
    intermediate: int
    """Of each expert."""
    shared_intermediate: int
    """Of the experts that every token uses, taken as one; 0: there is none."""
    gating: Gating
    normalized: bool
    scale: float
    num_groups: int
    num_groups_used: int


def read_mixture(header: HeaderReader, hidden: int, gating: int = 1, normalized: bool = False) -> MixtureShape:
    """`expert_*` keys; what cannot be read becomes one of the header's problems.

    gating and normalized: the family's own where the header is silent.
    """
    num_experts, intermediate = header.count("expert_count"), header.count("expert_feed_forward_length")
    num_groups = header.count("expert_group_count", 1)
    shape = MixtureShape(
        hidden=hidden,
        num_experts=num_experts,
        num_used=header.count("expert_used_count"),
        intermediate=intermediate,
        shared_intermediate=header.count_or_none("expert_shared_count") * intermediate,
        gating=read_gating(header, gating),
        normalized=header.flag("expert_weights_norm", normalized),
        scale=header.positive("expert_weights_scale", 1.0),
        num_groups=num_groups,
        num_groups_used=header.count("expert_group_used_count", num_groups),
    )
    header.problems += bad_groups(header.architecture, shape)
    return shape


def read_gating(header: HeaderReader, default: int) -> Gating:
    """What makes scores of a router's logits."""
    name = f"{header.architecture}.expert_gating_func"
    value = header.metadata.get(name, default)
    gating = GATINGS.get(whole_number(value) or 0)
    if gating is None:
        header.problems.append(f"metadata key {name} is {short(value)}: it must be 1 for softmax or 2 for sigmoid")
        return Gating.SOFTMAX
    return gating


def bad_groups(family: str, shape: MixtureShape) -> list[str]:
    """Counts of experts and groups that do not go together."""
    if shape.num_used > shape.num_experts:
        return [
            f"metadata key {family}.expert_used_count is {shape.num_used}: there are only {shape.num_experts} experts"
        ]
    if shape.num_experts % shape.num_groups or shape.num_groups_used > shape.num_groups:
        return [
            f"{shape.num_experts} experts cannot form {shape.num_groups} equal groups with {shape.num_groups_used} of "
            f"them used ({family}.expert_group_count, expert_group_used_count)"
        ]
    eligible = shape.num_experts // shape.num_groups * shape.num_groups_used
    if shape.num_used > eligible:
        return [
            f"metadata key {family}.expert_used_count is {shape.num_used}: {shape.num_groups_used} groups "
            f"({family}.expert_group_used_count) have only {eligible} experts"
        ]
    return []


def mixture_shapes(shape: MixtureShape) -> tuple[Shapes, Shapes]:
    """Tensors of a layer by name with the shape they must have: those it needs, and those it may have."""
    hidden, inner, shared = (
        shape.hidden,
        (shape.num_experts, shape.intermediate, shape.hidden),
        shape.shared_intermediate,
    )
    needed: Shapes = {
        "ffn_norm.weight": (hidden,),
        "ffn_gate_inp.weight": (shape.num_experts, hidden),
        "ffn_gate_exps.weight": inner,
        "ffn_up_exps.weight": inner,
        "ffn_down_exps.weight": (shape.num_experts, hidden, shape.intermediate),
    }
    if shared:
        needed |= {f"ffn_{part}_shexp.weight": (shared, hidden) for part in ("gate", "up")}
        needed["ffn_down_shexp.weight"] = (hidden, shared)
    return needed, {"exp_probs_b.bias": (shape.num_experts,)}


@dataclass(frozen=True)
class Mixture:
    """A feed-forward of experts behind its norm."""

    norm: Norm
    experts: Experts
    shared: tuple[Projection, Projection, Projection] | None
    """Gate, up and down of the experts that every token uses."""

    def of(self, x: Tensor, ops: Ops) -> Tensor:
        """What the experts make of norm(x): [tokens, hidden] → the same."""
        y = ops.rms_norm(x, self.norm)
        routed = ops.mixture(y, self.experts)
        if self.shared is None:
            return routed
        gate, up, down = self.shared
        return ops.project_add(ops.silu_mul(*ops.project(y, gate, up)), down, routed)

    def add_to(self, x: Tensor, ops: Ops) -> Tensor:
        """x and what the experts make of norm(x)."""
        return ops.add(x, self.of(x, ops))


def bind_mixture(bind: Binder, block: str, shape: MixtureShape) -> Mixture:
    """The feed-forward of a block such as `blk.3.`."""
    names: Mapping[str, Any] = bind.checkpoint.tensors
    bias = f"{block}exp_probs_b.bias"
    routing = Routing(
        num_used=shape.num_used,
        gating=shape.gating,
        normalized=shape.normalized,
        scale=shape.scale,
        bias=bind.vector(bias) if bias in names else None,
        num_groups=shape.num_groups,
        num_groups_used=shape.num_groups_used,
        # DeepSeek-V2 judges a group by its best expert, V3, which brought the bias, by its best two
        best_of_group=2 if bias in names else 1,
    )
    gate, up, down = (f"{block}ffn_{part}" for part in ("gate", "up", "down"))
    return Mixture(
        norm=bind.norm(f"{block}ffn_norm"),
        experts=Experts(
            router=bind.router(block),
            gate=bind.experts(f"{gate}_exps"),
            up=bind.experts(f"{up}_exps"),
            down=bind.experts(f"{down}_exps"),
            routing=routing,
        ),
        shared=(
            (bind.projection(f"{gate}_shexp"), bind.projection(f"{up}_shexp"), bind.projection(f"{down}_shexp"))
            if shape.shared_intermediate
            else None
        ),
    )
