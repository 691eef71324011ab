"""The operations of `api.ops` on the native library: recorded and replayed as one call, or run one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, Int32Array
from pocketllm.engine.backends.api.ops import Norm, RopeLayout
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.cpu import profile
from pocketllm.engine.backends.cpu.caches import KV_DTYPES, KVCache, PagedCache
from pocketllm.engine.backends.cpu.library import AttentionPlan, Engine, Program, Rotation, usable_isas
from pocketllm.engine.backends.cpu.matrices import Matrix
from pocketllm.engine.backends.cpu.operations.compressed import CompressedOps
from pocketllm.engine.backends.cpu.operations.latent import LatentOps
from pocketllm.engine.backends.cpu.operations.mixture import MixtureOps
from pocketllm.engine.backends.cpu.operations.recorder import ACTIVATIONS, Result, batch_of, rows_of, width_of
from pocketllm.engine.backends.cpu.operations.recurrent import RecurrentOps
from pocketllm.engine.backends.cpu.operations.selection import SelectionOps, selection_arguments
from pocketllm.engine.backends.cpu.operations.streams import StreamOps
from pocketllm.engine.backends.cpu.program import LOGIT_ROWS, SYMBOLIC, Captured, Command, Float32Array, pointer
from pocketllm.errors import OptionError

ACTIVATION_DTYPES = ("int8", "mixed", "int16", "float32")
"""What rows become before they meet a quantized matrix: integers with a scale and middle for each 32, or as they are.
`mixed` is int16 for matrices that are wide (`Projection.is_wide`) and int8 for others."""
ADD, SILU_MUL, GELU_MUL, SIGMOID_MUL, MUL = range(5)
NUMERICS = 2
"""Raised whenever the same input may give other bits."""


def numerics_version(isa: str, activation_dtype: str, kv_dtype: str) -> str:
    """Names everything that decides which bits come out; on them all of x86's sets with fused multiply-add agree."""
    arithmetic = {"portable": "unfused", "neon": "neon"}.get(isa, "fused")
    return f"cpu-{NUMERICS}-{arithmetic}-{activation_dtype}-{kv_dtype}"


class CpuOps(MixtureOps, LatentOps, SelectionOps, CompressedOps, RecurrentOps, StreamOps):
    """Every operation on the CPU. Tensors are float32 arrays, or values of a program while one is captured."""

    def __init__(
        self, threads: int, activation_dtype: str = "int8", kv_dtype: str = "float16", isa: str | None = None
    ) -> None:
        for name, value, known in (
            ("activation_dtype", activation_dtype, ACTIVATION_DTYPES),
            ("kv_dtype", kv_dtype, KV_DTYPES),
            ("isa", isa or usable_isas()[0], usable_isas()),
        ):
            if value not in known:
                raise OptionError(f"{name}={value!r} is none of {', '.join(known)}")
        self.engine = Engine(threads, isa)
        profile.start_if_asked(self.engine)
        self.isa = self.engine.isa
        self.numerics_version = numerics_version(self.isa, activation_dtype, kv_dtype)
        self.activations = ACTIVATIONS.index("int8" if activation_dtype == "mixed" else activation_dtype)
        self.wide_activations = ACTIVATIONS.index("int16") if activation_dtype == "mixed" else self.activations
        self.kv_dtype = KV_DTYPES.index(kv_dtype)
        self.recorded: list[Command] | None = None

    # -- at load -------------------------------------------------------------------------------------------------------
    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Matrix:
        """Repack a matrix, all threads together."""
        return Matrix(self.engine, data, quant_type, shape)

    def load_vector(self, values: npt.NDArray[np.float32]) -> Float32Array:
        """A copy: the file may be closed or changed later."""
        return np.array(values, dtype=np.float32)

    def new_kv_cache(
        self,
        num_layers: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        in_windows: bool = False,
    ) -> KVCache:
        """Zeros, which the operating system hands out as they are written: a thread does so ahead of what steps use."""
        shape = num_layers, num_kv_heads, key_dim, value_dim
        return KVCache(self.engine, self.kv_dtype, *shape, num_blocks, block_size, in_windows)

    # -- each step -----------------------------------------------------------------------------------------------------
    def embed(self, table: Matrix, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Any:
        def append(program: Program, _: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("embed", table.address, scale, outputs[0])

        return self.compute(append, (), (table.cols,), batch_of(input_ids=input_ids))[0]

    def rms_norm(self, x: Any, norm: Norm) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (pointer(norm.weight), len(norm.weight), norm.eps, outputs[0])
            program.append("rms_norm", rows_of(x), inputs[0], width_of(x), *arguments)

        return self.compute(append, (x,), (width_of(x),), in_place=((0, 0),))[0]

    def layer_norm(self, x: Any, norm: Norm, bias: Float32Array) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (width_of(x), pointer(norm.weight), pointer(bias), norm.eps, outputs[0])
            program.append("layer_norm", rows_of(x), inputs[0], *arguments)

        assert len(norm.weight) == len(bias) == width_of(x), (len(norm.weight), len(bias), width_of(x))
        return self.compute(append, (x,), (width_of(x),), in_place=((0, 0),))[0]

    def rope_angles(self, inv_freq: Float32Array, positions: npt.NDArray[np.int32], magnitude: float) -> Any:
        """[tokens, 2 · frequencies]: cosines, then sines, the angle in float64 before it is rounded."""

        def append(program: Program, _: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("angles", pointer(inv_freq), len(inv_freq), magnitude, outputs[0])

        return self.compute(append, (), (2 * len(inv_freq),), batch_of(input_ids=positions, positions=positions))[0]

    def rope(self, x: Any, angles: Any, head_dim: int, layout: RopeLayout) -> Any:
        how = Rotation(head_dim, 0, width_of(angles) // 2, layout is RopeLayout.HALF_SPLIT, False)
        return self._turn(x, angles, how)

    def rope_last(self, x: Any, angles: Any, head_dim: int, inverse: bool = False) -> Any:
        pairs = width_of(angles) // 2
        return self._turn(x, angles, Rotation(head_dim, head_dim - 2 * pairs, pairs, False, inverse))

    def _turn(self, x: Any, angles: Any, how: Rotation) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("rope", inputs[0], width_of(x), inputs[1], how, outputs[0])

        return self.compute(append, (x, angles), (width_of(x),), in_place=((0, 0),))[0]

    def store_kv(self, cache: KVCache, layer: int, k: Any, v: Any, batch: ForwardBatch) -> None:
        def append(program: Program, inputs: Sequence[int], _: Sequence[int]) -> None:
            program.append("store_kv", cache.address, layer, *inputs)

        assert (width_of(k), width_of(v)) == (cache.kv_heads * cache.key_dim, cache.kv_heads * cache.value_dim)
        self.compute(append, (k, v), (), batch)

    def attention(self, q: Any, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Any:
        return self._attention(q, None, cache, layer, batch, spec)

    def selected_attention(
        self, q: Any, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec, selection: Any
    ) -> Any:
        return self._attention(q, None, cache, layer, batch, spec, selection)

    def sink_attention(
        self, q: Any, sinks: Float32Array, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec
    ) -> Any:
        return self._attention(q, sinks, cache, layer, batch, spec)

    def _attention(
        self,
        q: Any,
        sinks: Float32Array | None,
        cache: KVCache,
        layer: int,
        batch: ForwardBatch,
        spec: AttentionSpec,
        selection: Any = None,
    ) -> Any:
        assert width_of(q) == spec.num_heads * cache.key_dim, (width_of(q), spec)
        assert sinks is None or sinks.shape == (spec.num_heads,), spec
        plan = AttentionPlan(spec.num_heads, spec.window or 0, spec.scale, spec.softcap or 0.0, pointer(sinks))
        plan.sinks_kept = sinks  # whoever borrows the address holds the plan

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            picked = selection_arguments(selection, inputs[1:])
            program.append("attend", cache.address, layer, plan, inputs[0], *picked, outputs[0])

        inputs = (q,) if selection is None else (q, selection)
        return self.compute(append, inputs, (spec.num_heads * cache.value_dim,), batch)[0]

    def silu_mul(self, gate: Any, up: Any) -> Any:
        return self._elementwise(SILU_MUL, gate, up)

    def limited_silu_mul(self, gate: Any, up: Any, limit: float) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("limited_mul", rows_of(gate), inputs[0], width_of(gate), inputs[1], limit, outputs[0])

        return self.compute(append, (gate, up), (width_of(gate),), in_place=((0, 0), (0, 1)))[0]

    def gelu_mul(self, gate: Any, up: Any) -> Any:
        return self._elementwise(GELU_MUL, gate, up)

    def sigmoid_mul(self, gate: Any, x: Any) -> Any:
        if width_of(gate) == width_of(x):
            return self._elementwise(SIGMOID_MUL, gate, x)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("gate_rows", inputs[1], width_of(x), inputs[0], outputs[0])

        assert width_of(gate) == 1, (width_of(gate), width_of(x))
        return self.compute(append, (gate, x), (width_of(x),), in_place=((0, 1),))[0]

    def scale(self, x: Any, factor: float) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("scale", rows_of(x), inputs[0], width_of(x), factor, outputs[0])

        return self.compute(append, (x,), (width_of(x),), in_place=((0, 0),))[0]

    def mul(self, x: Any, y: Any) -> Any:
        if not (isinstance(y, np.ndarray) and y.ndim == 1):
            return self._elementwise(MUL, x, y)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("mul_each", rows_of(x), inputs[0], width_of(x), pointer(y), outputs[0])

        assert len(y) == width_of(x), (len(y), width_of(x))
        return self.compute(append, (x,), (width_of(x),), in_place=((0, 0),))[0]

    def hadamard(self, x: Any, rotation: Hadamard, inverse: bool = False) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (width_of(x), pointer(rotation.signs), rotation.block, inverse, outputs[0])
            program.append("hadamard", rows_of(x), inputs[0], *arguments)

        return self.compute(append, (x,), (width_of(x),))[0]

    def add(self, x: Any, y: Any) -> Any:
        return self._elementwise(ADD, x, y)

    def _elementwise(self, what: int, x: Any, y: Any) -> Any:
        assert width_of(x) == width_of(y), (width_of(x), width_of(y))

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("elementwise", what, rows_of(x), inputs[0], width_of(x), inputs[1], outputs[0])

        return self.compute(append, (x, y), (width_of(x),), in_place=((0, 0), (0, 1)))[0]

    def take(self, x: Any, rows: npt.NDArray[np.int32]) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("take", inputs[0], width_of(x), outputs[0])

        return self.compute(append, (x,), (width_of(x),), batch_of(logit_rows=rows), rows=LOGIT_ROWS)[0]

    def columns(self, x: Any, first: int, last: int) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            if first < last:  # a head without rotated values has none of them
                program.append("columns", rows_of(x), inputs[0], width_of(x), first, last - first, outputs[0])

        return self.compute(append, (x,), (last - first,))[0]

    def copy_blocks(self, cache: PagedCache, sources: Int32Array, targets: Int32Array) -> None:
        blocks = cache.blocks()
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            blocks[target] = blocks[source]

    def to_numpy(self, x: Float32Array) -> npt.NDArray[np.float32]:
        """A copy; of rows that have just been computed and that nobody else was given, the rows themselves."""
        if isinstance(x, Result) and x.base is None and not x.is_shared:
            x.is_shared = True
            return x.view(np.ndarray)
        return np.array(x, dtype=np.float32)

    def synchronize(self) -> None:
        """Every call has finished when it returns."""

    def capture(self, forward: Callable[[ForwardBatch], Any], max_tokens: int) -> Captured:
        """Call forward once to record its operations; a step is then one native call."""
        assert self.recorded is None, "capture within capture"
        self.recorded = []
        try:
            result = forward(SYMBOLIC)
            return Captured(self.engine, self.recorded, result, max_tokens)
        finally:
            self.recorded = None
