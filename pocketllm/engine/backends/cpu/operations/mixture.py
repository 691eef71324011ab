"""Mixtures of experts on the native library."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.ops import BoundedExperts, Experts, Gating
from pocketllm.engine.backends.cpu.library import MixturePlan, Program
from pocketllm.engine.backends.cpu.matrices import ExpertMatrices, Matrix
from pocketllm.engine.backends.cpu.operations.projections import Projector
from pocketllm.engine.backends.cpu.operations.recorder import width_of
from pocketllm.engine.backends.cpu.program import pointer

GATINGS = (Gating.SOFTMAX, Gating.SIGMOID)
"""In the order of native/runtime/phases/phases.h, `Gating`."""


class MixtureOps(Projector):
    """Operations whose matrices are those of several experts."""

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> ExpertMatrices:
        """Repack each expert's matrix by itself: its rows are whole groups, whatever their number."""
        parts = np.ascontiguousarray(data).reshape(shape[0], -1)
        return ExpertMatrices([Matrix(self.engine, part, quant_type, shape[1:]) for part in parts])

    def mixture(self, x: Any, experts: Experts) -> Any:
        """The router is a projection of its own; what follows it is one phase after another over grouped rows."""
        return self._mixture(x, experts, None)

    def bounded_mixture(self, x: Any, experts: BoundedExperts) -> Any:
        return self._mixture(x, experts.experts, experts)

    def _mixture(self, x: Any, experts: Experts, bounded: BoundedExperts | None) -> Any:
        routing, width = experts.routing, width_of(x)
        logits = self.project(x, experts.router)[0]
        assert {len(m.matrices) for m in (experts.gate, experts.up, experts.down)} == {width_of(logits)}
        plan = MixturePlan(
            gate=experts.gate.pointer(),
            up=experts.up.pointer(),
            down=experts.down.pointer(),
            bias=pointer(routing.bias),
            num_experts=width_of(logits),
            num_used=routing.num_used,
            gating=GATINGS.index(routing.gating),
            normalized=routing.normalized,
            scale=routing.scale,
            num_groups=routing.num_groups,
            num_groups_used=routing.num_groups_used,
            best_of_group=routing.best_of_group,
        )
        if bounded is not None:
            for name in ("gate_bias", "up_bias", "down_bias"):
                setattr(plan, name, pointer(getattr(bounded, name)))
            plan.slope, plan.limit = bounded.slope, bounded.limit
        plan.weights_kept = (experts, bounded)  # whoever borrows their addresses holds the plan

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (width, inputs[1], self.is_exact, plan, outputs[0])
            program.append("mixture", self.engine.address, inputs[0], *arguments)

        return self.compute(append, (x, logits), (width,))[0]
