"""qwen35moe: qwen35's layers, with a mixture of experts and a shared one for every feed-forward.

Qwen Team 2026, "Qwen3.5". Norms are stored with their 1 added, but for the one within a DeltaNet head; value heads are
stored tiled: head j reads key head j mod the number of key heads.
"""

from pocketllm.engine.models.blocks import Shapes
from pocketllm.engine.models.parts.hybrid import bind_tiled_delta, step_shapes
from pocketllm.engine.models.parts.hybrid_mixture import (
    HybridMixtureShape,
    hybrid_mixture_family,
    read_hybrid_mixture,
)

ARCHITECTURE = "qwen35moe"

read_shape = read_hybrid_mixture


def tensor_shapes(shape: HybridMixtureShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    return shape.tensors(step_shapes(shape.hybrid))


FAMILY = hybrid_mixture_family(ARCHITECTURE, tensor_shapes, bind_tiled_delta)
