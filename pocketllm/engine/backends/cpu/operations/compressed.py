"""Groups of tokens that become one entry, and attention over a window and entries, on the native library."""

from collections.abc import Sequence
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.compressed import Compressor, WindowSpec
from pocketllm.engine.backends.cpu.caches import CompressedCache
from pocketllm.engine.backends.cpu.library import CompressPlan, Program, WindowPlan
from pocketllm.engine.backends.cpu.operations.recorder import Recorder, width_of
from pocketllm.engine.backends.cpu.operations.recurrent import States, state_plan
from pocketllm.engine.backends.cpu.operations.selection import selection_arguments
from pocketllm.engine.backends.cpu.program import Float32Array, pointer


class CompressedOps(Recorder):
    """Operations over a cache of entries, and over what a sequence's end needs besides."""

    def new_compressed_cache(
        self, num_layers: int, dim: int, ratio: int, num_blocks: int, block_size: int
    ) -> CompressedCache:
        """Zeros, which the operating system hands out as they are written."""
        return CompressedCache(self.engine, self.kv_dtype, num_layers, dim, ratio, num_blocks, block_size)

    def compress(
        self,
        values: Any,
        gates: Any,
        states: States,
        state_layer: int,
        cache: CompressedCache,
        layer: int,
        batch: ForwardBatch,
        compressor: Compressor,
    ) -> None:
        norm, inv_freq = compressor.norm, compressor.inv_freq
        plan = CompressPlan(
            compressor.ratio,
            compressor.dim,
            compressor.overlaps,
            0 if inv_freq is None else len(inv_freq),
            0.0 if norm is None else norm.eps,
            pointer(compressor.position),
            None if norm is None else pointer(norm.weight),
            pointer(inv_freq),
        )
        plan.compressor_kept = compressor  # whoever borrows its addresses holds the plan
        kept, width = state_plan(states.conv, state_layer), width_of(values)
        assert width == width_of(gates) == compressor.width, (width, width_of(gates), compressor.width)

        def append(program: Program, inputs: Sequence[int], _: Sequence[int]) -> None:
            program.append("compress", cache.address, layer, plan, inputs[0], width, inputs[1], kept)

        self.compute(append, (values, gates), (), batch)

    def window_attention(
        self,
        q: Any,
        rows: Any,
        sinks: Float32Array,
        states: States,
        state_layer: int,
        batch: ForwardBatch,
        spec: WindowSpec,
        cache: CompressedCache | None = None,
        layer: int = 0,
        selection: Any = None,
    ) -> Any:
        plan = WindowPlan(spec.num_heads, spec.dim, spec.window, spec.scale, pointer(sinks))
        plan.sinks_kept = sinks
        kept, entries = state_plan(states.conv, state_layer), None if cache is None else cache.address
        assert (width_of(q), width_of(rows)) == (spec.num_heads * spec.dim, spec.dim), (width_of(q), width_of(rows))

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            picked = selection_arguments(selection, inputs[2:])
            program.append("window_attend", entries, layer, plan, inputs[0], inputs[1], kept, *picked, outputs[0])

        inputs = (q, rows) if selection is None else (q, rows, selection)
        return self.compute(append, inputs, (width_of(q),), batch)[0]
