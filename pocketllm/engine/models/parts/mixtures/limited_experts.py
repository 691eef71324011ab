"""Feed-forwards whose activations are limited: one for all tokens, or experts beside one that every token uses.

DeepSeek-AI 2026, "DeepSeek-V4", in whose first layers a token's id names its experts; GLM 5.3 Flash has them too.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import LimitedExperts
from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Ops, Projection, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.contract import Checkpoint
from pocketllm.engine.models.header import HeaderReader, is_list, short, whole_number
from pocketllm.errors import GGUFError

LIMITED_OPS = frozenset({"load_experts", "limited_mixture", "limited_silu_mul", "add"})
ROUTES = "ffn_gate_tid2eid.weight"
SIGMOID, SQRT_SOFTPLUS = 2, 4
"""As `expert_gating_func` spells them."""
GATINGS = {SIGMOID: Gating.SIGMOID, SQRT_SOFTPLUS: Gating.SQRT_SOFTPLUS}
WORDS = {SIGMOID: "sigmoid", SQRT_SOFTPLUS: "the root of a softplus"}
MOST_LAYERS = 1 << 16
"""A count above it is refused later, by the number of tensors, and must not be counted up to here."""


@dataclass(frozen=True)
class LimitedShape:
    """Sizes of a layer's experts, and how a token finds its own."""

    num_experts: int
    num_used: int
    intermediate: int
    num_shared: int
    gating: Gating
    normalized: bool
    scale: float
    num_hashed: int
    """First layers whose experts are named by token ids."""
    limits: tuple[float, ...]
    """Of each layer's experts; infinity: there is none."""
    shared_limits: tuple[float, ...]
    """Of what every token uses."""

    @property
    def shared_intermediate(self) -> int:
        """Of the experts that every token uses, taken as one."""
        return self.num_shared * self.intermediate


def read_limited(header: HeaderReader, num_layers: int, gating: int, default: int | None = None) -> LimitedShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems.

    gating: what `expert_gating_func` must be; default: what it is where the header is silent, which then may leave out
    limits too: there are none.
    """
    name = f"{header.architecture}.expert_gating_func"
    said = header.metadata.get(name, default)
    if whole_number(said) != gating:
        header.problems.append(f"metadata key {name} is {short(said)}: it must be {gating}, {WORDS[gating]}")
    num_limits = min(num_layers, MOST_LAYERS)
    limits = read_limits(header, "swiglu_clamp_exp", num_limits, None if default is None else (inf,) * num_limits)
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
        gating=GATINGS[gating],
        normalized=header.flag("expert_weights_norm", True),
        scale=header.positive("expert_weights_scale", 1.0),
        num_hashed=header.count_or_none("hash_layer_count"),
        limits=limits,
        shared_limits=read_limits(header, "swiglu_clamp_shexp", num_limits, limits),
    )


def read_limits(
    header: HeaderReader, name: str, num_layers: int, absent: tuple[float, ...] | None
) -> tuple[float, ...]:
    """A number above 0 for each layer, or one for all; absent: those of a header without, None where it must be."""
    limits = header.metadata.get(f"{header.architecture}.{name}")
    if limits is None and absent is not None:
        return absent
    own: list[Any] = list(limits[:num_layers]) if is_list(limits) else [limits] * num_layers
    are_numbers = all(isinstance(limit, int | float | np.floating) and 0 < limit < inf for limit in own)
    if len(own) != num_layers or not are_numbers:
        header.problems.append(
            f"metadata key {header.architecture}.{name} is {short(limits)}: it must be a number above 0 for each layer"
        )
        return (1.0,)
    return tuple(float(limit) for limit in own)


def limited_shapes(shape: LimitedShape, layer: int, hidden: int, vocab_size: int) -> Shapes:
    """A layer's tensors by the last parts of their names."""
    inner = (shape.num_experts, shape.intermediate, hidden)
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
        **gated_shapes("_shexp", hidden, shape.shared_intermediate),
    }


def gated_shapes(suffix: str, hidden: int, inner: int) -> Shapes:
    """Tensors of a feed-forward that is no mixture; suffix: behind `ffn_gate`, `ffn_up` and `ffn_down`."""
    opening: Shapes = {f"ffn_{part}{suffix}.weight": (inner, hidden) for part in ("gate", "up")}
    return opening | {f"ffn_down{suffix}.weight": (hidden, inner)}


def bad_limited(shape: LimitedShape, checkpoint: Checkpoint) -> list[str]:
    """Tables of experts by token id that are not whole numbers."""
    return [
        f"tensor {name} is of type {tensor.quant_type}, and must be I32: it names experts"
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(f".{ROUTES}") and tensor.quant_type != "I32"
    ]


@dataclass(frozen=True)
class LimitedSwiGLU:
    """A feed-forward that every token uses."""

    gate: Projection
    up: Projection
    down: Projection
    limit: float

    def of(self, y: Tensor, ops: Ops, batch: ForwardBatch) -> Tensor:
        """down(limited gate · up): [tokens, hidden] → the same."""
        gate, up = ops.project(y, self.gate, self.up)
        return ops.project(ops.limited_silu_mul(gate, up, self.limit), self.down)[0]


@dataclass(frozen=True)
class LimitedMixture:
    """The experts, and the one that every token uses."""

    experts: LimitedExperts
    shared: LimitedSwiGLU

    def of(self, y: Tensor, ops: Ops, batch: ForwardBatch) -> Tensor:
        """mixture(y) + shared(y): [tokens, hidden] → the same."""
        routed = ops.limited_mixture(y, self.experts, batch.input_ids)
        return ops.add(routed, self.shared.of(y, ops, batch))


def bind_limited_swiglu(bind: Binder, block: str, suffix: str, limit: float) -> LimitedSwiGLU:
    """The feed-forward of a block such as `blk.0.`; suffix: as for `gated_shapes`."""
    gate, up, down = (bind.projection(f"{block}ffn_{part}{suffix}") for part in ("gate", "up", "down"))
    return LimitedSwiGLU(gate, up, down, limit)


def bind_limited(bind: Binder, shape: LimitedShape, layer: int) -> LimitedMixture:
    """A layer's experts."""
    block, is_hashed = f"blk.{layer}.", layer < shape.num_hashed
    bias = None if is_hashed else bind.vector(f"{block}exp_probs_b.bias")
    return LimitedMixture(
        experts=LimitedExperts(
            experts=Experts(
                router=bind.router(block),
                gate=bind.experts(f"{block}ffn_gate_exps"),
                up=bind.experts(f"{block}ffn_up_exps"),
                down=bind.experts(f"{block}ffn_down_exps"),
                routing=Routing(shape.num_used, shape.gating, shape.normalized, shape.scale, bias),
            ),
            limit=shape.limits[layer],
            routes=read_routes(bind.checkpoint, f"{block}{ROUTES}", shape) if is_hashed else None,
        ),
        shared=bind_limited_swiglu(bind, block, "_shexp", shape.shared_limits[layer]),
    )


def read_routes(checkpoint: Checkpoint, name: str, shape: LimitedShape) -> npt.NDArray[np.int32]:
    """[vocab, num_used] experts of each token id; GGUFError where one is not there."""
    routes = np.frombuffer(checkpoint.data(name).tobytes(), "<i4").astype(np.int32).reshape(-1, shape.num_used)
    if routes.min() < 0 or routes.max() >= shape.num_experts:
        raise GGUFError(
            f"tensor {name} names experts {routes.min()} to {routes.max()}, and there are {shape.num_experts} from 0 on"
        )
    return routes
