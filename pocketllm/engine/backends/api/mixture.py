"""What layers with a mixture of experts ask of a backend: routes, and the matrices and scales of the experts."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Gating(Enum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    """over all experts"""
    SIGMOID = "sigmoid"
    """of each by itself"""
    SQRT_SOFTPLUS = "sqrt_softplus"
    """the root of ln(1 + e^logit), of each by itself; `limited_mixture` alone has it"""


@dataclass(frozen=True)
class Routing:
    """Which experts a token is sent to, and what each counts; in float32.

    The num_used experts with the highest score + bias, of equal ones the lower index first. An expert's weight is its
    score *without* the bias, divided by the sum over those used when normalized, times scale.

    With more than one group, experts of consecutive indices form groups of equal size, and only those of the
    num_groups_used best groups are eligible: a group is as good as its best_of_group highest scores + biases together,
    of equal ones the lower index first (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437).
    """

    num_used: int
    gating: Gating
    normalized: bool
    scale: float = 1.0
    bias: Any | None = None
    """[experts]"""
    num_groups: int = 1
    num_groups_used: int = 1
    best_of_group: int = 1


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forwards: a router [experts, in], and matrices of all experts as `load_experts` gave."""

    router: Any
    """`ops.Projection`"""
    gate: Any
    """`ops.Weight`, as are up and down"""
    up: Any
    down: Any
    routing: Routing


@dataclass(frozen=True)
class BoundedExperts:
    """Experts with biases whose gate is bounded (gpt-oss): with g = min(gate x, limit) and u = up x within ±limit, an
    expert gives down(g · sigmoid(slope · g) · (u + 1))."""

    experts: Experts
    gate_bias: Any
    """`ops.Tensor` [experts, inner], as is up_bias"""
    up_bias: Any
    down_bias: Any
    """[experts, out]"""
    slope: float
    limit: float


@dataclass(frozen=True)
class ScaledExperts:
    """Experts that give scale · down(gelu(gate x) · up x), gelu in its tanh form (Gemma 4)."""

    experts: Experts
    scale: Any
    """[experts]"""
