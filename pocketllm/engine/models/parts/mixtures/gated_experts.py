"""A mixture of experts, and beside it an expert that every token uses, under a gate of one value: the feed-forward of
qwen3next and of the mixtures that follow it.
"""

from dataclasses import dataclass

from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.header import HeaderReader

GATED_EXPERTS_OPS = frozenset({"load_experts", "mixture", "add", "silu_mul", "sigmoid_mul"})
GATED_EXPERTS_NEUTRAL = {"expert_gating_func": 1, "expert_weights_scale": 1.0, "leading_dense_block_count": 0}
"""Keys that would change the computation, with the value at which they do not."""


@dataclass(frozen=True)
class GatedExpertsShape:
    """Sizes of a layer's experts."""

    num_experts: int
    num_used: int
    intermediate: int
    """Of each expert."""
    shared_intermediate: int
    normalized: bool

    def matrices(self, hidden: int) -> Shapes:
        """By name without `.weight`."""
        inner, shared = (self.num_experts, self.intermediate, hidden), (self.shared_intermediate, hidden)
        return {
            "ffn_gate_inp": (self.num_experts, hidden),
            "ffn_gate_exps": inner,
            "ffn_up_exps": inner,
            "ffn_down_exps": (self.num_experts, hidden, self.intermediate),
            "ffn_gate_inp_shexp": (1, hidden),
            "ffn_gate_shexp": shared,
            "ffn_up_shexp": shared,
            "ffn_down_shexp": (hidden, self.shared_intermediate),
        }


def read_gated_experts(header: HeaderReader) -> GatedExpertsShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_experts, num_used = header.count("expert_count"), header.count("expert_used_count")
    if num_used > num_experts:
        header.problems.append(
            f"metadata key {header.architecture}.expert_used_count is {num_used}: there are only {num_experts} experts"
        )
    intermediate = header.count("expert_feed_forward_length")
    return GatedExpertsShape(
        num_experts=num_experts,
        num_used=num_used,
        intermediate=intermediate,
        shared_intermediate=header.count("expert_shared_feed_forward_length", intermediate),
        normalized=header.flag("expert_weights_norm", True),
    )


@dataclass(frozen=True)
class GatedExperts:
    """The experts, and the one that every token uses."""

    experts: Experts
    weight: Projection
    """[1, hidden] what the shared expert counts, behind a sigmoid."""
    gate: Projection
    up: Projection
    down: Projection

    def of(self, y: Tensor, ops: Ops) -> Tensor:
        """mixture(y) + sigmoid(weight y) · down(silu(gate y) · up y): [tokens, hidden] → the same."""
        weight, gate, up = ops.project(y, self.weight, self.gate, self.up)
        shared = ops.sigmoid_mul(weight, ops.project(ops.silu_mul(gate, up), self.down)[0])
        return ops.add(ops.mixture(y, self.experts), shared)


@dataclass(frozen=True)
class NormedExperts:
    """The feed-forward behind its norm."""

    norm: Norm
    experts: GatedExperts

    def add_to(self, x: Tensor, ops: Ops) -> Tensor:
        """x and what the experts make of norm(x)."""
        return ops.add(x, self.experts.of(ops.rms_norm(x, self.norm), ops))


def bind_normed_experts(bind: Binder, block: str, shape: GatedExpertsShape) -> NormedExperts:
    """The feed-forward of a block such as `blk.0.`."""
    return NormedExperts(bind.norm(f"{block}post_attention_norm"), bind_gated_experts(bind, block, shape))


def bind_gated_experts(bind: Binder, block: str, shape: GatedExpertsShape) -> GatedExperts:
    """The experts of a block such as `blk.0.`."""
    return GatedExperts(
        experts=Experts(
            router=bind.router(block),
            gate=bind.experts(f"{block}ffn_gate_exps"),
            up=bind.experts(f"{block}ffn_up_exps"),
            down=bind.experts(f"{block}ffn_down_exps"),
            routing=Routing(shape.num_used, Gating.SOFTMAX, shape.normalized),
        ),
        weight=bind.projection(f"{block}ffn_gate_inp_shexp"),
        gate=bind.projection(f"{block}ffn_gate_shexp"),
        up=bind.projection(f"{block}ffn_up_shexp"),
        down=bind.projection(f"{block}ffn_down_shexp"),
    )
