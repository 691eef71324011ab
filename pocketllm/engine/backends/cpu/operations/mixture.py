"""Mixtures of experts on the native library."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import LimitedExperts
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, ScaledExperts
from pocketllm.engine.backends.cpu.library import MixturePlan, Program
from pocketllm.engine.backends.cpu.matrices import ExpertMatrices, Matrix
from pocketllm.engine.backends.cpu.operations.projections import Projector
from pocketllm.engine.backends.cpu.operations.recorder import batch_of, width_of
from pocketllm.engine.backends.cpu.program import pointer

GATINGS = (Gating.SOFTMAX, Gating.SIGMOID, Gating.SQRT_SOFTPLUS)
"""In the order of native/runtime/phases/phases.h, `Gating`."""


class MixtureOps(Projector):
    """Operations whose matrices are those of several experts."""

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> ExpertMatrices:
        """Repack each expert's matrix by itself: its rows are whole groups, whatever their number."""
        parts = np.ascontiguousarray(data).reshape(shape[0], -1)
        return ExpertMatrices([Matrix(self.engine, part, quant_type, shape[1:]) for part in parts])

    def mixture(self, x: Any, experts: Experts) -> Any:
        """The router is a projection of its own; what follows it is one phase after another over grouped rows."""
        return self._mixture(x, experts, self._plan(experts))

    def bounded_mixture(self, x: Any, experts: BoundedExperts) -> Any:
        plan = self._plan(experts.experts)
        for name in ("gate_bias", "up_bias", "down_bias"):
            setattr(plan, name, pointer(getattr(experts, name)))
        plan.slope, plan.limit, plan.biases_kept = experts.slope, experts.limit, experts
        return self._mixture(x, experts.experts, plan)

    def limited_mixture(self, x: Any, experts: LimitedExperts, input_ids: npt.NDArray[np.int32]) -> Any:
        plan = self._plan(experts.experts)
        plan.limit = experts.limit
        if experts.routes is not None:
            plan.routes_kept = routes = np.ascontiguousarray(experts.routes, np.int32)
            assert routes.shape[1] == plan.num_used, (routes.shape, plan.num_used)
            assert 0 <= routes.min() <= routes.max() < plan.num_experts, (routes.min(), routes.max())
            plan.routes, plan.num_routes = pointer(routes), len(routes)
        return self._mixture(x, experts.experts, plan, batch_of(input_ids=input_ids))

    def scaled_mixture(self, x: Any, routed_by: Any, experts: ScaledExperts) -> Any:
        plan = self._plan(experts.experts)
        plan.expert_scale, plan.scale_kept = pointer(experts.scale), experts.scale
        return self._mixture(x, experts.experts, plan, routed_by=routed_by)

    def _plan(self, experts: Experts) -> MixturePlan:
        routing = experts.routing
        plan = MixturePlan(
            gate=experts.gate.pointer(),
            up=experts.up.pointer(),
            down=experts.down.pointer(),
            bias=pointer(routing.bias),
            num_experts=len(experts.gate.matrices),
            num_used=routing.num_used,
            gating=GATINGS.index(routing.gating),
            normalized=routing.normalized,
            scale=routing.scale,
            num_groups=routing.num_groups,
            num_groups_used=routing.num_groups_used,
            best_of_group=routing.best_of_group,
        )
        plan.experts_kept = experts  # whoever borrows their addresses holds the plan
        return plan

    def _mixture(
        self,
        x: Any,
        experts: Experts,
        plan: MixturePlan,
        batch: ForwardBatch | None = None,
        routed_by: Any = None,
    ) -> Any:
        width = width_of(x)
        logits = self.project(x if routed_by is None else routed_by, experts.router)[0]
        assert {len(m.matrices) for m in (experts.gate, experts.up, experts.down)} == {width_of(logits)}

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (width, inputs[1], self.activations, plan, outputs[0])
            program.append("mixture", self.engine.address, inputs[0], *arguments)

        return self.compute(append, (x, logits), (width,), batch)[0]
