"""Multi-head latent attention on the native library."""

from collections.abc import Sequence
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch, LatentAttentionSpec
from pocketllm.engine.backends.cpu.caches import LatentCache
from pocketllm.engine.backends.cpu.library import AttentionPlan, Program
from pocketllm.engine.backends.cpu.matrices import ExpertMatrices
from pocketllm.engine.backends.cpu.operations.recorder import Recorder, width_of
from pocketllm.engine.backends.cpu.operations.selection import selection_arguments


class LatentOps(Recorder):
    """Operations over a cache of latents, which all heads share."""

    def new_latent_cache(self, num_layers: int, dim: int, num_blocks: int, block_size: int) -> LatentCache:
        """Zeros, which the operating system hands out as they are written."""
        return LatentCache(self.engine, self.kv_dtype, num_layers, dim, num_blocks, block_size)

    def project_heads(self, x: Any, weight: ExpertMatrices) -> Any:
        heads, width = len(weight.matrices), width_of(x)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (width, self.activations, weight.pointer(), heads, outputs[0])
            program.append("project_heads", self.engine.address, inputs[0], *arguments)

        return self.compute(append, (x,), (heads * weight.matrices[0].rows,))[0]

    def store_latent(self, cache: LatentCache, layer: int, batch: ForwardBatch, *parts: Any) -> None:
        first, *rest = parts

        def append(program: Program, inputs: Sequence[int], _: Sequence[int]) -> None:
            key = inputs[1] if rest else None
            program.append("store_latent", cache.address, layer, inputs[0], width_of(first), key)

        assert len(rest) <= 1, "rows have at most two parts"
        assert sum(map(width_of, parts)) == cache.dim, ([width_of(part) for part in parts], cache.dim)
        self.compute(append, parts, (), batch)

    def latent_attention(
        self,
        q_latent: Any,
        q_rope: Any,
        cache: LatentCache,
        layer: int,
        batch: ForwardBatch,
        spec: LatentAttentionSpec,
        selection: Any = None,
    ) -> Any:
        plan, width = AttentionPlan(spec.num_heads, 0, spec.scale, 0.0), width_of(q_latent)
        assert width == spec.num_heads * spec.rank, (width, spec)
        assert width_of(q_rope) == spec.num_heads * (cache.dim - spec.rank), (width_of(q_rope), spec)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            picked = selection_arguments(selection, inputs[2:])
            q = inputs[0], width, inputs[1]
            program.append("attend_latent", cache.address, layer, plan, *q, *picked, outputs[0])

        inputs = (q_latent, q_rope) if selection is None else (q_latent, q_rope, selection)
        return self.compute(append, inputs, (width,), batch)[0]
