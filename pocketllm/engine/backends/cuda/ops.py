"""The operations of `api.ops` by Triton kernels on one NVIDIA GPU.

Norms before products, gates, and the rotation of heads are not computed where they are asked for but where their result
is read: `Gated` and `Heads` stand for them, and `written` makes rows of them for whoever else asks.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, Int32Array
from pocketllm.engine.backends.api.compressed import LimitedExperts
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, ScaledExperts
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout
from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.attention import Heads, New, PagedCache, attend, store
from pocketllm.engine.backends.cuda.kernels.heads import angles_kernel
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_indexed
from pocketllm.engine.backends.cuda.layers.compressed.entries import CompressedCache
from pocketllm.engine.backends.cuda.layers.compressed.ops import CompressedOps
from pocketllm.engine.backends.cuda.layers.indexed.groups import Groups, attend_groups
from pocketllm.engine.backends.cuda.layers.indexed.ops import IndexedOps
from pocketllm.engine.backends.cuda.layers.latent.attention import LatentCache
from pocketllm.engine.backends.cuda.layers.latent.ops import LatentOps
from pocketllm.engine.backends.cuda.layers.operands import (
    GELU,
    LIMITED,
    PRODUCT,
    SIGMOID,
    SILU,
    Rows,
    may_take,
    normed,
    part_of,
    to_route,
    written,
)
from pocketllm.engine.backends.cuda.layers.recurrent.ops import RecurrentOps
from pocketllm.engine.backends.cuda.layers.streams.ops import StreamOps
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Matrix, Plain
from pocketllm.engine.backends.cuda.matrices.uploads import Uploads
from pocketllm.engine.backends.cuda.mixtures.groups import BOUNDED, Ends, Normed
from pocketllm.engine.backends.cuda.mixtures.layer import Mixed, MixedSum, Mixtures
from pocketllm.engine.backends.cuda.products import FEW_ROWS, Attended, Gated, Part, Products, Sum, new_halves
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch
from pocketllm.engine.backends.cuda.steps.drawing.drawer import CudaDrawer
from pocketllm.engine.backends.cuda.steps.graphs import Captured, capture
from pocketllm.engine.backends.cuda.steps.kinds import Apart
from pocketllm.engine.weights.tensor_file import Stored

KV_DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


class CudaOps(CompressedOps, IndexedOps, LatentOps, RecurrentOps, StreamOps):
    """Every operation on the GPU; on the CPU too, where Triton's interpreter runs the kernels."""

    def __init__(self, kv_dtype: str = "float16", device: str = "cuda", is_invariant: bool = False) -> None:
        """is_invariant: whether a row's bits must not depend on what else a step holds (see `steps.kinds`)."""
        self._device = torch.device(device)
        self._kv_dtype = KV_DTYPES[kv_dtype]
        self._uploads = Uploads(self._device)
        self._products = Products(self._device, is_invariant)
        self._mixtures = Mixtures(self._products)
        self._batch: tuple[ForwardBatch, DeviceBatch] | None = None
        self._constants = {}
        # an engine that is let go takes its cache and graphs with it
        self._captured: WeakSet[Captured] = WeakSet()
        self._num_graphs = 0
        self._new: tuple[PagedCache, int, New, DeviceBatch] | None = None
        # products in float32 are so to the last bit
        torch.backends.cuda.matmul.allow_tf32 = False

    # -- at load -------------------------------------------------------------------------------------------------------
    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Matrix:
        """Copy and repack a matrix on the device."""
        return matrices.load(data, quant_type, shape, self._uploads)

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> ExpertMatrices:
        """Copy and repack the matrices on the device."""
        return matrices.load_experts(data, quant_type, shape, self._uploads)

    def load_stored(
        self, stored: Stored, quant_type: str, shape: tuple[int, int] | tuple[int, int, int]
    ) -> Matrix | ExpertMatrices:
        """Read, copy and repack by and by."""
        if len(shape) == 3:
            return matrices.load_experts(stored, quant_type, shape, self._uploads)
        return matrices.load(stored, quant_type, shape, self._uploads)

    def load_vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """A copy: the file may be closed or changed later."""
        copied = torch.empty(values.shape, dtype=torch.float32, pin_memory=self._device.type == "cuda")
        np.copyto(copied.numpy(), values)
        return copied.to(self._device, non_blocking=True)  # without waiting for matrices that are on their way

    def new_kv_cache(
        self,
        num_layers: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        in_windows: bool = False,
    ) -> PagedCache:
        """Zeros."""

        def zeros(dtype: torch.dtype, *each: int) -> list[Tensor]:
            return [torch.zeros(num_blocks, *each, dtype=dtype, device=self._device) for _ in range(num_layers)]

        keys, values = (zeros(self._kv_dtype, block_size, num_kv_heads, dim) for dim in (key_dim, value_dim))
        how = in_windows, self._products.is_invariant
        if self._kv_dtype.itemsize > 1:
            return PagedCache(keys, values, *how)
        key_scales, value_scales = (zeros(torch.float32, num_kv_heads, block_size) for _ in range(2))
        return PagedCache(keys, values, *how, key_scales, value_scales)

    def copy_blocks(
        self, cache: PagedCache | LatentCache | CompressedCache, sources: Int32Array, targets: Int32Array
    ) -> None:
        layers = cache.tensors() if isinstance(cache, PagedCache) else cache.rows
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for kept in layers:
                kept[target] = kept[source]

    # -- each step -----------------------------------------------------------------------------------------------------
    def embed(self, table: Matrix, input_ids: npt.NDArray[np.int32] | Tensor, scale: float = 1.0) -> Tensor:
        ids = self._on_device(input_ids)
        if isinstance(table.held, Plain):
            return table.held.values[ids].float() * scale
        out = torch.empty(len(ids), table.cols, dtype=torch.float32, device=self._device)
        unpack_indexed(table.held, ids, out, scale)
        return out

    def rms_norm(self, x: Rows, norm: Norm) -> Rows:
        return Normed(x, norm) if isinstance(x, Sum) else normed(written(x), norm)

    def project(self, x: Rows, *projections: Projection, norm: Norm | None = None) -> tuple[Tensor | Part, ...]:
        """Norm, gate and rounding in one kernel, then one for all matrices of one layout."""
        if isinstance(x, Normed) and norm is None and len(x.norm.weight) == projections[0].weight.cols:
            norm, x = x.norm, x.x
        operand = x if isinstance(x, Gated | Attended | Sum) else written(x)
        graph = next((c.last[1] for c in self._captured if c.last is not None and c.last[0] is x), None)
        if graph is None or norm is not None:
            return self._products.project(operand, projections, norm, None)
        key = tuple(id(projection.weight) for projection in projections)
        if key not in graph.heads:
            graph.heads[key] = capture(
                lambda: self._products.project(graph.result, projections, None, None), torch.cuda.graph_pool_handle()
            )
            self._count_graph()
        graph.heads[key].graph.replay()
        return tuple(out[: len(operand)] for out in graph.heads[key].result)

    def project_add(self, x: Rows, projection: Projection, residual: Rows) -> Tensor | Sum | Part:
        operand, rest = x if isinstance(x, Gated | Attended) else written(x), written(residual)
        late = self._products.sum(operand, projection, rest) if self._products.is_decode else None
        return late or self._products.project(operand, (projection,), None, rest)[0]

    def rope_angles(self, inv_freq: Tensor, positions: npt.NDArray[np.int32] | Tensor, magnitude: float) -> Tensor:
        """[tokens, 2, frequencies]: cosines, then sines."""
        places = self._on_device(positions)
        out = torch.empty(len(places), 2, len(inv_freq), dtype=torch.float32, device=self._device)
        angles_kernel[(len(places),)](
            places,
            inv_freq,
            out,
            magnitude,
            len(inv_freq),
            BLOCK=triton.next_power_of_2(len(inv_freq)),
            num_warps=1,
        )
        return out

    def rope(self, x: Rows, angles: Tensor, head_dim: int, layout: RopeLayout) -> Heads:
        if isinstance(x, Heads) and x.angles is None and x.head_dim == head_dim:
            return Heads(x.x, head_dim, x.norm, angles, layout)
        return Heads(written(x), head_dim, None, angles, layout)

    def store_kv(self, cache: PagedCache, layer: int, k: Rows, v: Rows, batch: ForwardBatch) -> None:
        """In decode steps put off: attention over the same layer keeps what it takes from k and v."""
        self._store_new()
        heads = k if isinstance(k, Heads) else Heads(written(k), cache.keys[layer].shape[-1])
        self._new = cache, layer, New(heads, written(v)), self._of(batch).blocks(cache.in_windows)
        if not self._products.is_decode:
            self._store_new()

    def _store_new(self) -> None:
        """Put what was put off into the cache."""
        if self._new is not None:
            cache, layer, new, batch = self._new
            store(new.k, new.v, cache, layer, batch.slot_mapping)
        self._new = None

    def attention(self, q: Rows, cache: PagedCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Rows:
        return self._attend(q, None, cache, layer, batch, spec)

    def sink_attention(
        self, q: Rows, sinks: Tensor, cache: PagedCache, layer: int, batch: ForwardBatch, spec: AttentionSpec
    ) -> Rows:
        return self._attend(q, sinks, cache, layer, batch, spec)

    def selected_attention(
        self, q: Rows, cache: PagedCache, layer: int, batch: ForwardBatch, spec: AttentionSpec, selection: Groups
    ) -> Tensor:
        self._store_new()
        heads = q if isinstance(q, Heads) else Heads(written(q), spec.head_dim)
        return attend_groups(heads, cache, layer, self._of(batch), spec, selection)

    def _attend(
        self,
        q: Rows,
        sinks: Tensor | None,
        cache: PagedCache,
        layer: int,
        batch: ForwardBatch,
        spec: AttentionSpec,
    ) -> Rows:
        heads = q if isinstance(q, Heads) else Heads(written(q), spec.head_dim)
        own = self._of(batch).blocks(cache.in_windows)
        new = None
        is_own = self._new is not None and self._new[0] is cache and self._new[1] == layer
        if self._new is not None and is_own and may_take(heads, self._new[2].k):
            new, self._new = self._new[2], None
        self._store_new()
        tokens, v_dim = len(heads.x), cache.values[layer].shape[-1]
        is_single = self._products.is_decode and tokens == 1 and not self._products.is_invariant
        is_handed_on = is_single and v_dim % 32 == 0 and v_dim & (v_dim - 1) == 0
        halves = new_halves(tokens, spec.num_heads * v_dim, self._device) if is_handed_on else None
        out = attend(heads, cache, layer, own, spec, new, halves, sinks)
        return out if halves is None else Attended(out, halves)

    def silu_mul(self, gate: Rows, up: Rows) -> Gated:
        return Gated(part_of(gate), part_of(up), SILU)

    def gelu_mul(self, gate: Rows, up: Rows) -> Gated:
        return Gated(part_of(gate), part_of(up), GELU)

    def sigmoid_mul(self, gate: Rows, x: Rows) -> Gated | Tensor:
        if isinstance(gate, Tensor) and gate.shape[1] == 1:
            return torch.sigmoid(gate) * written(x)
        return Gated(part_of(gate), part_of(x), SIGMOID)

    def mul(self, x: Rows, y: Rows) -> Gated | Tensor:
        if isinstance(y, Tensor) and y.ndim == 1:
            return written(x) * y
        return Gated(part_of(x), part_of(y), PRODUCT)

    def scale(self, x: Rows, factor: float) -> Tensor:
        return written(x) * factor

    def columns(self, x: Rows, first: int, last: int) -> Tensor:
        """A view."""
        return written(x)[:, first:last]

    def limited_silu_mul(self, gate: Rows, up: Rows, limit: float) -> Gated:
        return Gated(part_of(gate), part_of(up), LIMITED, limit)

    def mixture(self, x: Rows, experts: Experts) -> Tensor | Mixed:
        return self._mixture(x, experts, Ends())

    def bounded_mixture(self, x: Rows, experts: BoundedExperts) -> Tensor | Mixed:
        biases = experts.gate_bias, experts.up_bias, experts.down_bias
        return self._mixture(x, experts.experts, Ends(BOUNDED, experts.slope, experts.limit, *biases))

    def scaled_mixture(self, x: Rows, routed_by: Rows, experts: ScaledExperts) -> Tensor | Mixed:
        return self._mixture(x, experts.experts, Ends(GELU, scale=experts.scale), routed_by)

    def limited_mixture(
        self, x: Rows, experts: LimitedExperts, input_ids: npt.NDArray[np.int32] | Tensor
    ) -> Tensor | Mixed:
        named = None
        if experts.routes is not None:
            key = (id(experts.routes),)
            if key not in self._constants:
                self._constants[key] = experts.routes, self._on_device(experts.routes)
            named = self._constants[key][1][self._on_device(input_ids)]
        return self._mixture(x, experts.experts, Ends(LIMITED, limit=experts.limit), named=named)

    def _mixture(
        self, x: Rows, experts: Experts, ends: Ends, routed_by: Rows | None = None, named: Tensor | None = None
    ) -> Tensor | Mixed:
        """In decode steps the last product is put off: what it is added to may be all that anyone reads."""
        router = None if routed_by is None else to_route(routed_by)
        mixed = self._mixtures.mixture(to_route(x), experts, ends, router, named)
        return mixed if self._products.is_decode else mixed.written()

    def add(self, x: Rows, y: Rows) -> Tensor | Sum:
        if isinstance(x, Mixed):
            x, y = y, x
        if isinstance(y, Mixed):
            return MixedSum(y, written(x))
        return written(x) + written(y)

    def take(self, x: Rows, rows: npt.NDArray[np.int32] | Tensor | None) -> Tensor:
        """Rows of x; None: all, as they are."""
        return written(x) if rows is None else written(x)[self._on_device(rows)]

    def to_numpy(self, x: Rows) -> npt.NDArray[np.float32]:
        """Through pinned memory, which torch keeps and gives again."""
        rows = written(x)
        host = torch.empty(rows.shape, dtype=torch.float32, pin_memory=self._device.type == "cuda")
        host.copy_(rows, non_blocking=True)
        self.synchronize()
        result: npt.NDArray[np.float32] = host.numpy()
        return result

    def synchronize(self) -> None:
        self._uploads.finish()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def capture(self, forward: Callable[[ForwardBatch], Any], max_tokens: int) -> Captured | Apart:
        """Steps become CUDA graphs when their size is first seen; they take tokens from a drawer of their own."""
        drawer = CudaDrawer(self._device, self._count_graph)

        def step(batch: DeviceBatch) -> Tensor:
            drawer.resolve(batch.input_ids)
            is_decode = batch.is_single and len(batch.input_ids) <= FEW_ROWS
            self._products.is_decode, self._products.is_prompt = is_decode, not is_decode
            try:
                result = written(forward(batch))  # type: ignore[arg-type]  # a ForwardBatch on the device
                self._store_new()
            finally:
                self._products.is_decode = self._products.is_prompt = False
            return result

        captured = Captured(step, drawer, self._device, max_tokens, self._count_graph)
        self._captured.add(captured)
        return Apart(captured, self._device) if self._products.is_invariant else captured

    def _count_graph(self) -> None:
        self._num_graphs += 1

    @property
    def num_compiles(self) -> int:
        """CUDA graphs captured until now; what Triton compiles outside of a capture is not counted."""
        return self._num_graphs
