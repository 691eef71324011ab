"""Products with matrices on the native library."""

from collections.abc import Sequence
from typing import Any

from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cpu.library import Program, ProjectionPlan
from pocketllm.engine.backends.cpu.operations.recorder import Recorder, rows_of, width_of
from pocketllm.engine.backends.cpu.program import pointer


class Projector(Recorder):
    """Operations that multiply rows with matrices."""

    def project(self, x: Any, *projections: Projection, norm: Norm | None = None) -> tuple[Any, ...]:
        """One phase quantizes the rows, one multiplies them with all matrices."""
        return self._project(x, projections, norm, None)

    def project_add(self, x: Any, projection: Projection, residual: Any) -> Any:
        return self._project(x, (projection,), None, residual)[0]

    def _project(self, x: Any, projections: Sequence[Projection], norm: Norm | None, residual: Any) -> tuple[Any, ...]:
        is_wide = any(projection.is_wide for projection in projections)
        activations = self.wide_activations if is_wide else self.activations

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            added = inputs[1] if residual is not None else None
            plans = (ProjectionPlan * len(projections))()
            for number, (projection, out) in enumerate(zip(projections, outputs, strict=True)):
                plans[number] = ProjectionPlan(projection.weight.address, pointer(projection.bias), added, out)
            norm_arguments = (None, 0.0) if norm is None else (pointer(norm.weight), norm.eps)
            arguments = (*norm_arguments, activations, len(projections), plans)
            program.append("project", self.engine.address, rows_of(x), inputs[0], width_of(x), *arguments)

        inputs, in_place = ((x,), ()) if residual is None else ((x, residual), ((0, 1),))
        return self.compute(append, inputs, [p.weight.rows for p in projections], in_place=in_place)
