"""What operations are timed on: sizes of a checkpoint and of a larger one, inputs, matrices, and one call of each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch, Int32Array
from pocketllm.engine.backends.api.backend import Calls, Peer, Probe
from pocketllm.engine.backends.api.ops import Ops, Tensor, Weight
from pocketllm.engine.models.contract import CacheSpec, KVSpec, LatentSpec, SeveralCaches
from pocketllm.engine.weights.quant import block_size

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

FLOAT_BYTES = 4
MOST_TURNS = 256
"""Weights, or places in a cache, that calls use in turn."""
POOL_BYTES = 1 << 20


@dataclass(frozen=True)
class Case:
    """One operation on one size. num_bytes: weights, inputs and results, each moved once; flops: 0 where nothing is
    multiplied."""

    op: str
    name: str
    calls: Calls
    """The same work on other memory; timed in turn."""
    num_bytes: float
    flops: float = 0.0
    kind: str = field(default="", kw_only=True)
    """Quant type, or what a cache keeps."""
    shape: str = field(default="", kw_only=True)
    rows: int = field(default=1, kw_only=True)
    peer: Calls = field(default=(), kw_only=True)
    """Another library's calls for the same."""
    reads_back: bool = field(default=False, kw_only=True)
    """Whether a call ends with its result on the host: then it is part of no captured step."""

    @property
    def call(self) -> Any:
        """The first."""
        return self.calls[0]


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
    experts: tuple[int, int] | None = None
    """How many, and how many a token uses, of `expert_inner` each."""
    expert_inner: int = 0
    mark: str = ""
    """In names of cases; none of the checkpoint's own."""

    @classmethod
    def of(cls, engine: "Engine") -> "Shape":
        metadata, spec = engine.checkpoint.metadata, engine.model.kv_spec
        family = engine.checkpoint.architecture

        def size(key: str) -> int:
            value = metadata[f"{family}.{key}"]
            return int(max(value) if isinstance(value, Sequence) else value)

        is_dense = f"{family}.feed_forward_length" in metadata
        inner = size("feed_forward_length" if is_dense else "expert_feed_forward_length")
        sizes = size("embedding_length"), inner, size("attention.head_count")
        experts, expert_inner = None, 0
        if {f"{family}.expert_used_count", f"{family}.expert_feed_forward_length"} <= metadata.keys():
            experts = size("expert_count"), size("expert_used_count")
            expert_inner = size("expert_feed_forward_length")
        kept = attention_kind(spec)
        if isinstance(kept, KVSpec):
            return cls(*sizes, kept.num_kv_heads, kept.key_dim, experts=experts, expert_inner=expert_inner)
        rope_dim = size("rope.dimension_count")
        rank = kept.dim - rope_dim
        return cls(*sizes, num_kv_heads=0, key_dim=rope_dim, rank=rank, experts=experts, expert_inner=expert_inner)


def attention_kind(spec: CacheSpec) -> KVSpec | LatentSpec:
    """The first kind of cache that attention reads."""
    parts = spec.parts if isinstance(spec, SeveralCaches) else (spec,)
    return next(part for part in parts if isinstance(part, KVSpec | LatentSpec))


@dataclass(frozen=True)
class Extent:
    """How much is timed."""

    rows: tuple[int, ...]
    """Of a call: one request's decode step, batches, a piece of a prompt."""
    matrices: tuple[tuple[int, int], ...]
    """(out, in) that every quant type is timed at, beside the checkpoint's own."""
    steps: tuple[tuple[int, int], ...]
    """(requests, tokens of each in the cache) before a decode step's attention."""
    mixture: Shape
    """Whose experts are timed where the checkpoint has none."""
    shapes: tuple[Shape, ...] = ()
    """Beside the checkpoint's."""

    @property
    def prompt(self) -> int:
        """Tokens of a piece of a prompt."""
        return max(self.rows)


EIGHT_B = Shape(4096, 14336, 32, 8, 128, mark="8B")
THIRTY_B = Shape(2048, 6144, 32, 4, 128, experts=(128, 8), expert_inner=768, mark="30B-A3B")
SMALL = Extent(
    rows=(1, 8, 64),
    matrices=((1024, 2048),),
    steps=((1, 128), (1, 1024), (1, 4096)),
    mixture=Shape(512, 512, 8, 8, 64, experts=(16, 4), expert_inner=256, mark="small"),
)
"""Of a few cores."""
LARGE = Extent(
    rows=(1, 8, 32, 512),
    matrices=((4096, 4096), (4096, 14336)),
    steps=((1, 128), (1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (32, 1024)),
    mixture=THIRTY_B,
    shapes=(EIGHT_B,),
)
"""Of a device with memory of its own."""


class Setting:
    """What cases are made of: an engine's backend, inputs of any width, and weights that calls use in turn."""

    def __init__(self, engine: "Engine", extent: Extent) -> None:
        self.engine = engine
        self.extent = extent
        self.ops: Ops = engine.backend.ops
        self.capability = engine.backend.capability
        self.probe: Probe | None = engine.backend.probe
        self._tables: dict[int, Weight] = {}
        self._products: dict[tuple[int, int, int], Calls] = {}

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The checkpoint's, then the extent's."""
        return (Shape.of(self.engine), *self.extent.shapes)

    @property
    def peer(self) -> Peer | None:
        return None if self.probe is None else self.probe.peer

    def rows(self, count: int, width: int, first: int = 0) -> Tensor:
        """[count, width], values in ±1: rows of a small float32 table from `first` on, read through the backend."""
        if width not in self._tables:
            values = np.random.default_rng(width).uniform(-1, 1, (self.extent.prompt, width)).astype(np.float32)
            self._tables[width] = self.ops.load_matrix(values.reshape(-1).view(np.uint8), "F32", values.shape)
        return self.ops.embed(self._tables[width], (np.arange(count, dtype=np.int32) + first) % self.extent.prompt)

    def resident(self, given: ForwardBatch | Int32Array) -> Any:
        """As a step hands it to operations."""
        return given if self.probe is None else self.probe.resident(given)

    def turns(self, num_bytes: float) -> int:
        """How many of so many bytes calls must go through in turn."""
        cold_bytes = 0 if self.probe is None else self.probe.cold_bytes
        return min(MOST_TURNS, max(1, math.ceil(cold_bytes / num_bytes)))

    def in_turn(self, weight: Weight, num_bytes: float) -> list[Weight]:
        """A matrix, and copies of it."""
        copies = range(1, self.turns(num_bytes))
        return [weight, *(self.probe.copy(weight) for _ in copies if self.probe is not None)]

    def kept_bytes(self, quant_type: str, elements: int) -> float:
        """Of a matrix once loaded."""
        each = self.capability.weight_bytes_per_element.get(quant_type)
        return num_bytes_of(quant_type, elements) if each is None else elements * each

    def cached_bytes(self, dim: int) -> float:
        """Of a number in the cache, with its share of the scale that `dim` of them may have."""
        return self.capability.kv_element_bytes + self.capability.kv_scale_bytes / dim

    def peer_product(self, rows: int, width: int, out: int) -> Calls:
        """The same calls for all quant types."""
        key = rows, width, out
        if self.peer is not None and key not in self._products:
            self._products[key] = self.peer.product(*key)
        return self._products.get(key, ())


def num_bytes_of(quant_type: str, elements: int) -> int:
    """In the file's encoding."""
    in_block, num_bytes = block_size(quant_type)
    return elements // in_block * num_bytes


def some_blocks(quant_type: str, *shape: int) -> npt.NDArray[np.uint8]:
    """A matrix of a type in the file's encoding, where there are no weights of it. Its bytes are random, for some
    devices multiply zeros faster, and from a range in which every scale is a float16 or float32 of moderate size."""
    pool = np.random.default_rng(0).integers(32, 64, POOL_BYTES, dtype=np.uint8)
    return np.resize(pool, num_bytes_of(quant_type, math.prod(shape)))
