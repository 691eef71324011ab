"""What benchmarks of operations need of a GPU: calls as one graph, ceilings, and torch's own operations beside ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, Int32Array
from pocketllm.engine.backends.api.backend import Calls
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices, Matrix, Plain
from pocketllm.engine.backends.cuda.packing import Packed
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch, to_device, upload
from pocketllm.engine.backends.cuda.steps.graphs import Graph, capture

COLD_CACHES = 4
"""Times the second-level cache that calls in turn go through."""
FREE_SHARE = 200
"""They go through one part in so many of the free memory at most: there may be a hundred matrices to time."""
AHEAD_CYCLES = 200_000
"""The device waits so long, 0.1 ms, before it is timed: by then the host has launched everything."""
COPY_BYTES = 1 << 29
MATMUL_SIZE = 8192
BEST_OF = 7
EPS = 1e-5


class GraphUnit:
    """Calls as a CUDA graph; see `api.backend.Unit`."""

    def __init__(self, graph: Graph, calls: Calls) -> None:
        self._graph = graph
        self._calls = calls  # a replay reads the memory of what they hold
        # torch has no types for its events
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Between two events around a replay."""
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._start.record()
        self._graph.graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class CudaProbe:
    """Obeys `api.backend.Probe`; on the CPU too, where nothing can be captured."""

    def __init__(self, device: torch.device, written: Callable[[Any], object]) -> None:
        """written: computes what a result has put off."""
        self._device = device
        self._written = written
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._first: Graph | None = None
        self._cold_bytes: int | None = None
        self.peer = TorchPeer(device, self)

    @property
    def cold_bytes(self) -> int:
        """Fixed when first asked for: then the model has taken its memory."""
        if self._cold_bytes is None:
            self._cold_bytes = 0
            if self._device.type == "cuda":
                cache = torch.cuda.get_device_properties(self._device).L2_cache_size
                self._cold_bytes = min(COLD_CACHES * cache, torch.cuda.mem_get_info(self._device)[0] // FREE_SHARE)
        return self._cold_bytes

    def resident(self, given: ForwardBatch | Int32Array) -> DeviceBatch | Tensor:
        return to_device(given, self._device) if isinstance(given, ForwardBatch) else upload(given, self._device)

    def copy(self, weight: Matrix | ExpertMatrices) -> Matrix | ExpertMatrices:
        held = cloned(weight.held)
        return Matrix(held) if isinstance(weight, Matrix) else weight.with_held(held)

    def together(self, calls: Calls) -> GraphUnit:
        if self._pool is None:
            raise RuntimeError("a CPU has no graphs")

        def run() -> None:
            for call in calls:
                self.finish(call())

        stream = torch.cuda.current_stream()
        try:
            if self._first is None:  # kept: when the last graph of a pool is gone, no other can be captured there
                self._first = capture(partial(torch.zeros, 1, device=self._device), self._pool)
            return GraphUnit(capture(run, self._pool), calls)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            raise

    def finish(self, result: Any) -> None:
        for part in result if isinstance(result, tuple) else (result,):
            if part is not None:
                self._written(part)

    def ceilings(self) -> Mapping[str, float]:
        return {
            "copy_gbs": 2 * COPY_BYTES / self._best_s(self._copy) / 1e9,
            "bf16_gflops": 2 * MATMUL_SIZE**3 / self._best_s(self._multiply) / 1e9,
        }

    def _best_s(self, make: Callable[[], Callable[[], Any]]) -> float:
        unit = self.together([make()])
        return min(unit.seconds() for _ in range(BEST_OF))

    def _copy(self) -> Callable[[], Any]:
        source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2))
        return partial(target.copy_, source)

    def _multiply(self) -> Callable[[], Any]:
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        left, right = (torch.randn(shape, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        return partial(torch.mm, left, right)


class TorchPeer:
    """Obeys `api.backend.Peer` with what torch calls: cuBLAS, and its fused attention."""

    name = f"torch {torch.__version__.partition('+')[0]}"

    def __init__(self, device: torch.device, probe: CudaProbe) -> None:
        self._device = device
        self._probe = probe

    def product(self, rows: int, width: int, out: int) -> Calls:
        x = self._random(rows, width)
        return [partial(functional.linear, x, weight) for (weight,) in self._in_turn((out, width))]

    def rms_norm(self, rows: int, width: int) -> Calls:
        x, weight = self._random(rows, width).float(), self._random(width).float()
        return [partial(functional.rms_norm, x, (width,), weight, EPS)]

    def attention(self, spec: AttentionSpec, seqs: int, queries: int, keys: int) -> Calls:
        if queries not in (1, keys):
            return []  # its causal mask begins with the first key
        q = self._random(seqs, spec.num_heads, queries, spec.head_dim)
        shape = (seqs, spec.num_kv_heads, keys, spec.head_dim)
        is_causal, enable_gqa = queries > 1, spec.num_kv_heads < spec.num_heads
        attend = partial(
            functional.scaled_dot_product_attention, is_causal=is_causal, scale=spec.scale, enable_gqa=enable_gqa
        )
        return [partial(attend, q, k, v) for k, v in self._in_turn(shape, shape)]

    def _in_turn(self, *shapes: tuple[int, ...]) -> Sequence[Sequence[Tensor]]:
        """Tensors of these shapes, as often as is cold."""
        num_bytes = 2 * sum(int(np.prod(shape)) for shape in shapes)
        first = [self._random(*shape) for shape in shapes]
        others = range(1, -(-self._probe.cold_bytes // num_bytes))
        return [first, *([tensor.clone() for tensor in first] for _ in others)]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self._device).half()


def cloned(held: Packed | Plain) -> Packed | Plain:
    """The same numbers elsewhere."""
    if isinstance(held, Plain):
        return Plain(held.values.clone())
    words, high, scales, shared = (part.clone() for part in (held.words, held.high, held.scales, held.shared))
    return replace(held, words=words, high=high, scales=scales, shared=shared)
