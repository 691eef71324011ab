"""The operations of `api.ops` on the native library: recorded and replayed as one call, or run one by one."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout
from pocketllm.engine.backends.cpu import profile
from pocketllm.engine.backends.cpu.library import (
    AttentionPlan,
    Engine,
    Native,
    Program,
    ProjectionPlan,
    Step,
    usable_isas,
)
from pocketllm.engine.backends.cpu.program import (
    LOGIT_ROWS,
    SYMBOLIC,
    TOKENS,
    Append,
    Captured,
    Command,
    Float32Array,
    Value,
    address_of,
    fill,
    pointer,
)
from pocketllm.engine.weights import bits
from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import OptionError

ACTIVATION_DTYPES = ("int8", "float32")
"""What rows become before they meet a quantized matrix: int8 with a scale and middle for each 32, or as they are."""
KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
"""What keys and values are kept as, in the order of native/kernels.h, `KvDtype`; int8 with a scale for each head."""
CODEBOOKS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
ADD, SILU_MUL, GELU_MUL = 0, 1, 2
NUMERICS = 2
"""Raised whenever the same input may give other bits."""


def numerics_version(isa: str, activation_dtype: str, kv_dtype: str) -> str:
    """Names everything that decides which bits come out; on them all of x86's sets with fused multiply-add agree."""
    arithmetic = {"portable": "unfused", "neon": "neon"}.get(isa, "fused")
    return f"cpu-{NUMERICS}-{arithmetic}-{activation_dtype}-{kv_dtype}"


class Matrix(Native):
    """A matrix [rows, cols], repacked into its engine's memory."""

    def __init__(self, engine: Engine, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> None:
        self.rows, self.cols = shape
        data = np.ascontiguousarray(data).reshape(-1)
        points = codebook(quant_type)
        type_id, file = BY_NAME[quant_type].type_id, (pointer(data), data.nbytes)
        new = engine.library.matrix_new(engine.address, type_id, *file, *shape, pointer(points))
        super().__init__(new, None, engine)


def codebook(quant_type: str) -> npt.NDArray[np.int8] | None:
    """Points of the types that pick several values at once, as int8; None for others."""
    named = "IQ1_S" if quant_type == "IQ1_M" else quant_type
    return np.ascontiguousarray(bits.grid(named)) if named in CODEBOOKS else None


class KVCache(Native):
    """Paged keys and values of all layers."""

    def __init__(
        self, engine: Engine, dtype: int, num_layers: int, kv_heads: int, key_dim: int, value_dim: int, *blocks: int
    ) -> None:
        self.kv_heads, self.key_dim, self.value_dim = kv_heads, key_dim, value_dim
        new = engine.library.kv_new(dtype, num_layers, kv_heads, key_dim, value_dim, *blocks)
        super().__init__(new, engine.library.kv_free, engine)

    def memory(self) -> npt.NDArray[np.uint8]:
        """All of its bytes, to look at and to write on in tests."""
        size = ctypes.c_int64()
        data = self.needs[0].library.kv_data(self.address, ctypes.byref(size))
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)), (size.value,))


class Result(np.ndarray[Any, Any]):
    """Rows that an operation has just computed; `to_numpy` may hand the memory itself to the first who asks."""

    is_shared = False


class CpuOps:
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
        self._is_exact = activation_dtype == "float32"
        self._kv_dtype = KV_DTYPES.index(kv_dtype)
        self._recorded: list[Command] | None = None

    # -- at load -------------------------------------------------------------------------------------------------------
    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Matrix:
        """Repack a matrix, all threads together."""
        return Matrix(self.engine, data, quant_type, shape)

    def load_vector(self, values: npt.NDArray[np.float32]) -> Float32Array:
        """A copy: the file may be closed or changed later."""
        return np.array(values, dtype=np.float32)

    def new_kv_cache(
        self, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int, num_blocks: int, block_size: int
    ) -> KVCache:
        """Zeros, which the operating system hands out as they are written."""
        return KVCache(
            self.engine, self._kv_dtype, num_layers, num_kv_heads, key_dim, value_dim, num_blocks, block_size
        )

    # -- each step -----------------------------------------------------------------------------------------------------
    def embed(self, table: Matrix, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Any:
        def append(program: Program, _: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("embed", table.address, scale, outputs[0])

        return self._compute(append, (), (table.cols,), batch_of(input_ids=input_ids))[0]

    def rms_norm(self, x: Any, norm: Norm) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            arguments = (pointer(norm.weight), len(norm.weight), norm.eps, outputs[0])
            program.append("rms_norm", rows_of(x), inputs[0], width_of(x), *arguments)

        return self._compute(append, (x,), (width_of(x),), in_place=((0, 0),))[0]

    def project(self, x: Any, *projections: Projection, norm: Norm | None = None) -> tuple[Any, ...]:
        """One phase quantizes the rows, one multiplies them with all matrices."""
        return self._project(x, projections, norm, None)

    def project_add(self, x: Any, projection: Projection, residual: Any) -> Any:
        return self._project(x, (projection,), None, residual)[0]

    def _project(self, x: Any, projections: Sequence[Projection], norm: Norm | None, residual: Any) -> tuple[Any, ...]:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            added = inputs[1] if residual is not None else None
            plans = (ProjectionPlan * len(projections))()
            for number, (projection, out) in enumerate(zip(projections, outputs, strict=True)):
                plans[number] = ProjectionPlan(projection.weight.address, pointer(projection.bias), added, out)
            norm_arguments = (None, 0.0) if norm is None else (pointer(norm.weight), norm.eps)
            arguments = (*norm_arguments, self._is_exact, len(projections), plans)
            program.append("project", self.engine.address, rows_of(x), inputs[0], width_of(x), *arguments)

        inputs, in_place = ((x,), ()) if residual is None else ((x, residual), ((0, 1),))
        return self._compute(append, inputs, [p.weight.rows for p in projections], in_place=in_place)

    def rope_angles(self, inv_freq: Float32Array, positions: npt.NDArray[np.int32], magnitude: float) -> Any:
        """[tokens, 2 · frequencies]: cosines, then sines, the angle in float64 before it is rounded."""

        def append(program: Program, _: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("angles", pointer(inv_freq), len(inv_freq), magnitude, outputs[0])

        return self._compute(append, (), (2 * len(inv_freq),), batch_of(input_ids=positions, positions=positions))[0]

    def rope(self, x: Any, angles: Any, head_dim: int, layout: RopeLayout) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            is_split = layout is RopeLayout.HALF_SPLIT
            arguments = (width_of(angles) // 2, head_dim, is_split, outputs[0])
            program.append("rope", inputs[0], width_of(x), inputs[1], *arguments)

        return self._compute(append, (x, angles), (width_of(x),), in_place=((0, 0),))[0]

    def store_kv(self, cache: KVCache, layer: int, k: Any, v: Any, batch: ForwardBatch) -> None:
        def append(program: Program, inputs: Sequence[int], _: Sequence[int]) -> None:
            program.append("store_kv", cache.address, layer, *inputs)

        assert (width_of(k), width_of(v)) == (cache.kv_heads * cache.key_dim, cache.kv_heads * cache.value_dim)
        self._compute(append, (k, v), (), batch)

    def attention(self, q: Any, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Any:
        assert width_of(q) == spec.num_heads * cache.key_dim, (width_of(q), spec)
        plan = AttentionPlan(spec.num_heads, spec.window or 0, spec.scale, spec.softcap or 0.0)

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("attend", cache.address, layer, plan, inputs[0], outputs[0])

        return self._compute(append, (q,), (spec.num_heads * cache.value_dim,), batch)[0]

    def silu_mul(self, gate: Any, up: Any) -> Any:
        return self._elementwise(SILU_MUL, gate, up)

    def gelu_mul(self, gate: Any, up: Any) -> Any:
        return self._elementwise(GELU_MUL, gate, up)

    def add(self, x: Any, y: Any) -> Any:
        return self._elementwise(ADD, x, y)

    def _elementwise(self, what: int, x: Any, y: Any) -> Any:
        assert width_of(x) == width_of(y), (width_of(x), width_of(y))

        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("elementwise", what, rows_of(x), inputs[0], width_of(x), inputs[1], outputs[0])

        return self._compute(append, (x, y), (width_of(x),), in_place=((0, 0), (0, 1)))[0]

    def take(self, x: Any, rows: npt.NDArray[np.int32]) -> Any:
        def append(program: Program, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("take", inputs[0], width_of(x), outputs[0])

        return self._compute(append, (x,), (width_of(x),), batch_of(logit_rows=rows), rows=LOGIT_ROWS)[0]

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
        assert self._recorded is None, "capture within capture"
        self._recorded = []
        try:
            result = forward(SYMBOLIC)
            return Captured(self.engine, self._recorded, result, max_tokens)
        finally:
            self._recorded = None

    # -- recorded or at once -------------------------------------------------------------------------------------------
    def _compute(
        self,
        append: Append,
        inputs: Sequence[Any],
        widths: Sequence[int],
        batch: ForwardBatch | None = None,
        rows: int | None = None,
        in_place: tuple[tuple[int, int], ...] = (),
    ) -> tuple[Any, ...]:
        """Outputs of one operation, each [rows, width]; rows: those of the inputs unless said."""
        if self._recorded is None:
            return self._run(append, inputs, widths, batch, rows)
        which = rows if rows is not None else inputs[0].rows if inputs else TOKENS
        outputs = tuple(Value(width, which) for width in widths)
        self._recorded.append(Command(append, tuple(inputs), outputs, in_place))
        return outputs

    def _run(
        self, append: Append, inputs: Sequence[Any], widths: Sequence[int], batch: ForwardBatch | None, rows: int | None
    ) -> tuple[Any, ...]:
        arrays = [np.ascontiguousarray(x, np.float32) for x in inputs]
        step = Step()
        kept = fill(step, batch or NOTHING)
        if arrays:
            assert len({len(x) for x in arrays}) == 1, [x.shape for x in arrays]
            step.num_tokens = len(arrays[0])
        count = step.num_logit_rows if rows == LOGIT_ROWS else step.num_tokens
        outputs = tuple(Result((count, width), np.float32) for width in widths)
        program = Program(self.engine, max(1, step.num_tokens))
        append(program, [address_of(x) for x in arrays], [address_of(x) for x in outputs])
        program.run(step)
        del kept
        return outputs


def width_of(x: Any) -> int:
    """Values in a row."""
    return x.width if isinstance(x, Value) else x.shape[-1]


def rows_of(x: Any) -> int:
    """Which count of a step x has as its number of rows; what is computed at once has tokens."""
    return x.rows if isinstance(x, Value) else TOKENS


NOTHING = ForwardBatch(
    input_ids=np.zeros(0, np.int32),
    positions=np.zeros(0, np.int32),
    query_start_loc=np.zeros(1, np.int32),
    seq_lens=np.zeros(0, np.int32),
    block_table=np.zeros((0, 0), np.int32),
    slot_mapping=np.zeros(0, np.int64),
    logit_rows=np.zeros(0, np.int32),
)


def batch_of(**arrays: Any) -> ForwardBatch:
    """A batch that has these fields only."""
    return replace(NOTHING, **arrays)
