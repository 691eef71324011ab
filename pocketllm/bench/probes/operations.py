"""Calls of a backend's operations at the shapes of a checkpoint, with the least they must move and compute."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, LatentAttentionSpec
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, RopeLayout, Tensor
from pocketllm.engine.models.contract import CacheSpec, KVSpec, LatentSpec, SeveralCaches
from pocketllm.engine.weights.quant import block_size

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

WIDTHS = (1, 8, 64)
"""Rows of a call: one request's decode step, a small batch, a piece of a prompt."""
DEPTHS = (128, 1024, 4096)
"""Tokens in the cache before an attention step."""
OTHER_SHAPE = (1024, 2048)
"""(out, in) of a matrix of a type that the checkpoint does not have."""
BLOCK_SIZE = 16
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Case:
    """One call. num_bytes: weights, inputs and results, each moved once; flops: 0 where nothing is multiplied."""

    op: str
    name: str
    call: Callable[[], Any]
    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a checkpoint, from its header."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    """0: heads share one row of `rank` + key_dim values."""
    key_dim: int
    rank: int = 0

    @classmethod
    def of(cls, engine: "Engine") -> "Shape":
        metadata, spec = engine.checkpoint.metadata, engine.model.kv_spec

        def size(key: str) -> int:
            value = metadata[f"{engine.checkpoint.architecture}.{key}"]
            return int(max(value) if isinstance(value, Sequence) else value)

        is_dense = f"{engine.checkpoint.architecture}.feed_forward_length" in metadata
        inner = size("feed_forward_length" if is_dense else "expert_feed_forward_length")
        sizes = size("embedding_length"), inner, size("attention.head_count")
        kept = attention_kind(spec)
        if isinstance(kept, KVSpec):
            return cls(*sizes, kept.num_kv_heads, kept.key_dim)
        rope_dim = size("rope.dimension_count")
        return cls(*sizes, num_kv_heads=0, key_dim=rope_dim, rank=kept.dim - rope_dim)


def attention_kind(spec: CacheSpec) -> KVSpec | LatentSpec:
    """The first kind of cache that attention reads."""
    parts = spec.parts if isinstance(spec, SeveralCaches) else (spec,)
    return next(part for part in parts if isinstance(part, KVSpec | LatentSpec))


class Rows:
    """Inputs of any width: rows of small float32 tables, read through the backend itself."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._tables: dict[int, Any] = {}

    def __call__(self, rows: int, width: int) -> Tensor:
        """[rows, width], values in ±1."""
        if width not in self._tables:
            values = np.random.default_rng(width).uniform(-1, 1, (max(WIDTHS), width)).astype(np.float32)
            self._tables[width] = self.ops.load_matrix(values.reshape(-1).view(np.uint8), "F32", values.shape)
        return self.ops.embed(self._tables[width], np.arange(rows, dtype=np.int32))


def make_cases(engine: "Engine") -> list[Case]:
    """Every case of this engine's backend and checkpoint, weights loaded."""
    shape, make_rows = Shape.of(engine), Rows(engine.backend.ops)
    makers = (projections, elementwise, attention)
    return [case for maker in makers for case in maker(engine, shape, make_rows)]


def projections(engine: "Engine", shape: Shape, make_rows: Rows) -> Iterator[Case]:
    """`project` of each type and shape of matrix in the checkpoint, and of the backend's other types at OTHER_SHAPE."""
    ops, capability = engine.backend.ops, engine.backend.capability
    matrices: dict[tuple[str, int, int], npt.NDArray[np.uint8]] = {}
    for name, tensor in engine.checkpoint.tensors.items():
        if len(tensor.shape) == 2 and tensor.quant_type in capability.quant_types:
            out, width = tensor.shape
            matrices.setdefault((tensor.quant_type, out, width), engine.checkpoint.data(name))
    for quant_type in capability.quant_types - {key[0] for key in matrices}:
        # a kernel's time does not depend on the values, so zeros do where there are no weights of a type
        num_bytes = num_bytes_of(quant_type, OTHER_SHAPE)
        matrices[quant_type, *OTHER_SHAPE] = np.zeros(num_bytes, np.uint8)
    for (quant_type, out, width), data in sorted(matrices.items(), key=lambda item: item[0]):
        weight = Projection(ops.load_matrix(data, quant_type, (out, width)))
        kept = capability.weight_bytes_per_element.get(quant_type)
        weight_bytes = data.size if kept is None else out * width * kept
        for rows in WIDTHS:
            yield Case(
                "project",
                f"project {quant_type} {width}→{out} ×{rows}",
                partial(ops.project, make_rows(rows, width), weight),
                weight_bytes + FLOAT_BYTES * rows * (width + out),
                2.0 * rows * out * width,
            )


def num_bytes_of(quant_type: str, shape: tuple[int, int]) -> int:
    """Bytes of a matrix in the file's encoding."""
    elements, num_bytes = block_size(quant_type)
    return math.prod(shape) // elements * num_bytes


def elementwise(engine: "Engine", shape: Shape, make_rows: Rows) -> Iterator[Case]:
    """Operations on rows alone, at each width."""
    ops = engine.backend.ops
    norm = Norm(ops.load_vector(np.ones(shape.hidden, np.float32)), 1e-5)
    heads = shape.num_heads * shape.key_dim
    frequencies = ops.load_vector(1e4 ** -np.linspace(0, 1, shape.key_dim // 2, endpoint=False, dtype=np.float32))
    for rows in WIDTHS:
        x, y, gate = make_rows(rows, shape.hidden), make_rows(rows, shape.hidden), make_rows(rows, shape.inner)
        q, positions = make_rows(rows, heads), np.arange(rows, dtype=np.int32)
        angles = ops.rope_angles(frequencies, positions, 1.0)
        calls: Mapping[str, tuple[Callable[[], Any], int]] = {
            "rms_norm": (partial(ops.rms_norm, x, norm), 2 * shape.hidden),
            "add": (partial(ops.add, x, y), 3 * shape.hidden),
            "silu_mul": (partial(ops.silu_mul, gate, gate), 2 * shape.inner),
            "rope": (partial(ops.rope, q, angles, shape.key_dim, RopeLayout.ADJACENT), 2 * heads + shape.key_dim),
            "rope_angles": (partial(ops.rope_angles, frequencies, positions, 1.0), shape.key_dim),
            "take": (partial(ops.take, x, positions), 2 * shape.hidden),
            "to_numpy": (partial(ops.to_numpy, x), 2 * shape.hidden),
        }
        for op, (call, floats) in calls.items():
            yield Case(op, f"{op} ×{rows}", call, FLOAT_BYTES * rows * floats)


def attention(engine: "Engine", shape: Shape, make_rows: Rows) -> Iterator[Case]:
    """`store_kv` and `attention`: one token over a cache of some depth, and a piece of a prompt over itself."""
    if not shape.num_kv_heads:
        yield from latent_attention(engine, shape, make_rows)
        return
    ops, element = engine.backend.ops, engine.backend.capability.kv_element_bytes
    spec = AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.key_dim, 1 / math.sqrt(shape.key_dim))
    kv_width, q_width = shape.num_kv_heads * shape.key_dim, shape.num_heads * shape.key_dim
    num_blocks = max(DEPTHS) // BLOCK_SIZE + 1
    cache = ops.new_kv_cache(1, shape.num_kv_heads, shape.key_dim, shape.key_dim, num_blocks, BLOCK_SIZE)
    fill_cache(ops, cache, make_rows, kv_width, max(DEPTHS) + 1)
    for rows, depth in [*((1, depth) for depth in DEPTHS), (max(WIDTHS), 0)]:
        batch = one_sequence(depth, rows)
        q, k = make_rows(rows, q_width), make_rows(rows, kv_width)
        seen = sum(depth + row + 1 for row in range(rows))
        moved = 2 * (depth + rows) * kv_width * element + FLOAT_BYTES * 2 * rows * q_width
        yield Case(
            "attention",
            f"attention ×{rows} over {depth + rows}",
            partial(ops.attention, q, cache, 0, batch, spec),
            moved,
            4.0 * seen * q_width,
        )
        if depth in (0, min(DEPTHS)):
            yield Case(
                "store_kv",
                f"store_kv ×{rows}",
                partial(ops.store_kv, cache, 0, k, k, batch),
                rows * kv_width * 2 * (FLOAT_BYTES + element),
            )


def latent_attention(engine: "Engine", shape: Shape, make_rows: Rows) -> Iterator[Case]:
    """`store_latent` and `latent_attention`, as `attention` times its two; under the names of those."""
    ops, element = engine.backend.ops, engine.backend.capability.kv_element_bytes
    spec = LatentAttentionSpec(shape.num_heads, shape.rank, shape.key_dim, 1 / math.sqrt(shape.key_dim))
    width = shape.rank + shape.key_dim
    cache = ops.new_latent_cache(1, width, max(DEPTHS) // BLOCK_SIZE + 1, BLOCK_SIZE)
    for first in range(0, max(DEPTHS) + 1, max(WIDTHS)):
        rows = min(max(WIDTHS), max(DEPTHS) + 1 - first)
        ops.store_latent(cache, 0, one_sequence(first, rows), make_rows(rows, width))
    for rows, depth in [*((1, depth) for depth in DEPTHS), (max(WIDTHS), 0)]:
        batch = one_sequence(depth, rows)
        q_latent, q_rope = (make_rows(rows, shape.num_heads * dim) for dim in (shape.rank, shape.key_dim))
        seen = sum(depth + row + 1 for row in range(rows))
        moved = (depth + rows) * width * element + FLOAT_BYTES * rows * shape.num_heads * (width + shape.rank)
        yield Case(
            "attention",
            f"latent_attention ×{rows} over {depth + rows}",
            partial(ops.latent_attention, q_latent, q_rope, cache, 0, batch, spec),
            moved,
            2.0 * seen * shape.num_heads * (width + shape.rank),
        )
        if depth in (0, min(DEPTHS)):
            yield Case(
                "store_kv",
                f"store_latent ×{rows}",
                partial(ops.store_latent, cache, 0, batch, make_rows(rows, width)),
                rows * width * (FLOAT_BYTES + element),
            )


def fill_cache(ops: Ops, cache: Any, make_rows: Rows, kv_width: int, tokens: int) -> None:
    """Keys and values for every place, so that attention reads numbers and not untouched pages."""
    for first in range(0, tokens, max(WIDTHS)):
        rows = min(max(WIDTHS), tokens - first)
        k = make_rows(rows, kv_width)
        ops.store_kv(cache, 0, k, k, one_sequence(first, rows))
    ops.synchronize()


def one_sequence(depth: int, rows: int) -> ForwardBatch:
    """`rows` new tokens of one sequence after `depth` cached ones, in blocks that follow one another."""
    positions = np.arange(depth, depth + rows, dtype=np.int32)
    blocks: npt.NDArray[np.int32] = np.arange(-(-(depth + rows) // BLOCK_SIZE), dtype=np.int32)
    return ForwardBatch(
        input_ids=np.zeros(rows, np.int32),
        positions=positions,
        query_start_loc=np.array([0, rows], np.int32),
        seq_lens=np.array([depth + rows], np.int32),
        block_table=blocks[None, :],
        slot_mapping=positions.astype(np.int64),
        logit_rows=np.array([rows - 1], np.int32),
    )
