"""Experts whose activations are limited, scored by the root of a softplus; in the first layers a token's id names them.

DeepSeek-AI 2026, "DeepSeek-V4". An expert that every token uses stands beside them, limited in the same way.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import LimitedExperts
from pocketllm.engine.backends.api.ops import Experts, Gating, Ops, Projection, Routing, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.contract import Checkpoint
from pocketllm.engine.models.header import HeaderReader, is_list, short, whole_number
from pocketllm.errors import GGUFError

LIMITED_OPS = frozenset({"load_experts", "limited_mixture", "limited_silu_mul", "add"})
ROUTES = "ffn_gate_tid2eid.weight"
SQRT_SOFTPLUS = 4
"""As `expert_gating_func` spells it."""


@dataclass(frozen=True)
class LimitedShape:
    """Sizes of a layer's experts, and how a token finds its own."""

    num_experts: int
    num_used: int
    intermediate: int
    num_shared: int
    normalized: bool
    scale: float
    num_hashed: int
    """First layers whose experts are named by token ids."""
    limits: tuple[float, ...]
    """Of each layer's experts."""
    shared_limits: tuple[float, ...]


def read_limited(header: HeaderReader, num_layers: int) -> LimitedShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    name = f"{header.architecture}.expert_gating_func"
    if whole_number(header.metadata.get(name)) != SQRT_SOFTPLUS:
        found = short(header.metadata.get(name))
        header.problems.append(f"metadata key {name} is {found}: it must be {SQRT_SOFTPLUS}, the root of a softplus")
    num_experts, num_used = header.count("expert_count"), header.count("expert_used_count")
    if num_used > num_experts:
        header.problems.append(
            f"metadata key {header.architecture}.expert_used_count is {num_used}: there are only {num_experts} experts"
        )
    return LimitedShape(
        num_experts=num_experts,
        num_used=num_used,
        intermediate=header.count("expert_feed_forward_length"),
        num_shared=header.count("expert_shared_count"),
        normalized=header.flag("expert_weights_norm", True),
        scale=header.positive("expert_weights_scale", 1.0),
        num_hashed=header.count_or_none("hash_layer_count"),
        limits=read_limits(header, "swiglu_clamp_exp", num_layers),
        shared_limits=read_limits(header, "swiglu_clamp_shexp", num_layers),
    )


def read_limits(header: HeaderReader, name: str, num_layers: int) -> tuple[float, ...]:
    """A number above 0 for each layer."""
    limits = header.metadata.get(f"{header.architecture}.{name}")
    own = list(limits[:num_layers]) if is_list(limits) else []
    are_numbers = all(isinstance(limit, int | float | np.floating) and 0 < limit < inf for limit in own)
    if len(own) != num_layers or not are_numbers:
        header.problems.append(
            f"metadata key {header.architecture}.{name} is {short(limits)}: it must be a number above 0 for each layer"
        )
        return (1.0,)
    return tuple(float(limit) for limit in own)


def limited_shapes(shape: LimitedShape, layer: int, hidden: int, vocab_size: int) -> Shapes:
    """A layer's tensors by the last parts of their names."""
    inner, shared = (shape.num_experts, shape.intermediate, hidden), shape.num_shared * shape.intermediate
    own: Shapes = (
        {ROUTES: (vocab_size, shape.num_used)}
        if layer < shape.num_hashed
        else {"exp_probs_b.bias": (shape.num_experts,)}
    )
    return own | {
        "ffn_gate_inp.weight": (shape.num_experts, hidden),
        "ffn_gate_exps.weight": inner,
        "ffn_up_exps.weight": inner,
        "ffn_down_exps.weight": (shape.num_experts, hidden, shape.intermediate),
        "ffn_gate_shexp.weight": (shared, hidden),
        "ffn_up_shexp.weight": (shared, hidden),
        "ffn_down_shexp.weight": (hidden, shared),
    }


def bad_limited(shape: LimitedShape, checkpoint: Checkpoint) -> list[str]:
    """Tables of experts by token id that are not whole numbers."""
    return [
        f"tensor {name} is of type {tensor.quant_type}, and must be I32: it names experts"
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(f".{ROUTES}") and tensor.quant_type != "I32"
    ]


@dataclass(frozen=True)
class LimitedMixture:
    """The experts, and the one that every token uses."""

    experts: LimitedExperts
    gate: Projection
    up: Projection
    down: Projection
    limit: float
    """Of the one that every token uses."""

    def of(self, y: Tensor, ops: Ops, batch: ForwardBatch) -> Tensor:
        """mixture(y) + down(limited gate · up): [tokens, hidden] → the same."""
        gate, up = ops.project(y, self.gate, self.up)
        opened = ops.limited_silu_mul(gate, up, self.limit)
        routed = ops.limited_mixture(y, self.experts, batch.input_ids)
        return ops.add(routed, ops.project(opened, self.down)[0])


def bind_limited(bind: Binder, shape: LimitedShape, layer: int) -> LimitedMixture:
    """A layer's feed-forward."""
    block, is_hashed = f"blk.{layer}.", layer < shape.num_hashed
    bias = None if is_hashed else bind.vector(f"{block}exp_probs_b.bias")
    return LimitedMixture(
        experts=LimitedExperts(
            experts=Experts(
                router=bind.projection(f"{block}ffn_gate_inp"),
                gate=bind.experts(f"{block}ffn_gate_exps"),
                up=bind.experts(f"{block}ffn_up_exps"),
                down=bind.experts(f"{block}ffn_down_exps"),
                routing=Routing(shape.num_used, Gating.SIGMOID, shape.normalized, shape.scale, bias),
            ),
            limit=shape.limits[layer],
            routes=read_routes(bind.checkpoint, f"{block}{ROUTES}", shape) if is_hashed else None,
        ),
        gate=bind.projection(f"{block}ffn_gate_shexp"),
        up=bind.projection(f"{block}ffn_up_shexp"),
        down=bind.projection(f"{block}ffn_down_shexp"),
        limit=shape.shared_limits[layer],
    )


def read_routes(checkpoint: Checkpoint, name: str, shape: LimitedShape) -> npt.NDArray[np.int32]:
    """[vocab, num_used] experts of each token id; GGUFError where one is not there."""
    routes = np.frombuffer(checkpoint.data(name).tobytes(), "<i4").astype(np.int32).reshape(-1, shape.num_used)
    if routes.min() < 0 or routes.max() >= shape.num_experts:
        raise GGUFError(
            f"tensor {name} names experts {routes.min()} to {routes.max()}, and there are {shape.num_experts} from 0 on"
        )
    return routes
