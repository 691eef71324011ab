"""All that the lifecycle knows of a model: what a family declares, and what a loaded model does.

A family is one file under `families/`, named after its GGUF architecture with `-` written `_`, that ends with a
constant `FAMILY`. It imports no torch: it computes by composing the operations of `backends.api.ops`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Ops, Projection, States, Tensor


class CacheSpec(Protocol):
    """What a model keeps of every token of a sequence: keys and values, a latent, or several of these side by side.

    What is kept of every token lies in the same blocks: one of a sequence is one range of its tokens in every cache.
    Layers that see a window have blocks of their own, of the same size.
    """

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """Bytes that one token adds over all layers; scale_bytes: beside each vector that is kept."""

    def bytes_per_sequence(self) -> int:
        """Bytes that one sequence takes beside, however long it is: its recurrent states."""
        return 0

    def window_tokens(self) -> int:
        """How many of the latest tokens layers that see a window look at; 0 without such layers."""
        return 0

    def bytes_in_window(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """Bytes that one token takes in all of those, while they keep it."""
        return 0

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        """Empty caches of num_blocks blocks of block_size tokens, as `Model.forward` is given them.

        num_slots: how many recurrent states there is room for, of a model that has some; num_window_blocks: blocks of
        its layers that see a window.
        """


@dataclass(frozen=True)
class KVSpec(CacheSpec):
    """Keys and values: `num_layers` layers, each with `num_kv_heads` heads of `key_dim` + `value_dim` values.

    window: each layer sees itself and the window - 1 tokens before it, so that older ones are not kept; None: all.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def _bytes_of_token(self, element_bytes: float, scale_bytes: int) -> int:
        each = (self.key_dim + self.value_dim) * element_bytes + 2 * scale_bytes
        return ceil(self.num_layers * self.num_kv_heads * each)

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return self._bytes_of_token(element_bytes, scale_bytes) if self.window is None else 0

    def window_tokens(self) -> int:
        return self.window if self.window and self.num_layers else 0

    def bytes_in_window(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return self._bytes_of_token(element_bytes, scale_bytes) if self.window is not None else 0

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        shape = self.num_layers, self.num_kv_heads, self.key_dim, self.value_dim
        if self.window is None:
            return ops.new_kv_cache(*shape, num_blocks, block_size)
        return ops.new_kv_cache(*shape, num_window_blocks, block_size, in_windows=True)


@dataclass(frozen=True)
class LatentSpec(CacheSpec):
    """One vector of `dim` values in each of `num_layers` layers, which all heads share.

    The latent of multi-head latent attention with its one rotated key (DeepSeek-AI 2024, arXiv 2405.04434).
    """

    num_layers: int
    dim: int

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return ceil(self.num_layers * (self.dim * element_bytes + scale_bytes))

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        return ops.new_latent_cache(self.num_layers, self.dim, num_blocks, block_size)


@dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """One vector of `dim` values for every `ratio` tokens in each of `num_layers` layers, which all heads share."""

    num_layers: int
    dim: int
    ratio: int

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """In blocks of whole groups; shorter blocks hold one vector each: see `bytes_in_blocks`."""
        return ceil(self.num_layers * (self.dim * element_bytes + scale_bytes) / self.ratio)

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        return ops.new_compressed_cache(self.num_layers, self.dim, self.ratio, num_blocks, block_size)


@dataclass(frozen=True)
class SeveralCaches(CacheSpec):
    """Caches of different kinds or shapes side by side; allocated, they are a tuple in this order."""

    parts: tuple[CacheSpec, ...]

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return sum(part.bytes_per_token(element_bytes, scale_bytes) for part in self.parts)

    def bytes_per_sequence(self) -> int:
        return sum(part.bytes_per_sequence() for part in self.parts)

    def window_tokens(self) -> int:
        return max((part.window_tokens() for part in self.parts), default=0)

    def bytes_in_window(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return sum(part.bytes_in_window(element_bytes, scale_bytes) for part in self.parts)

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        return tuple(part.allocate(ops, num_blocks, block_size, num_slots, num_window_blocks) for part in self.parts)


@dataclass(frozen=True)
class StateSpec(CacheSpec):
    """A recurrent state in each of `num_layers` layers, of one size whatever the sequence's length; float32.

    conv: the [rows, channels] that a causal convolution looks back on; delta: the matrices [heads, key_dim, value_dim]
    of a delta rule. A sequence's state is kept in a slot instead of blocks.
    """

    num_layers: int
    conv: tuple[int, int]
    delta: tuple[int, int, int] = (0, 0, 0)

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        return 0

    def bytes_per_sequence(self) -> int:
        return 4 * self.num_layers * (prod(self.conv) + prod(self.delta))

    def allocate(
        self, ops: Ops, num_blocks: int, block_size: int, num_slots: int = 0, num_window_blocks: int = 0
    ) -> KVCache:
        return ops.new_states(self.num_layers, self.conv, self.delta, num_slots)


def bytes_in_blocks(spec: CacheSpec, element_bytes: float, scale_bytes: int, block_size: int) -> int:
    """Bytes per token as they are in blocks of that size: those of a group that is no part of a block are whole."""
    if isinstance(spec, SeveralCaches):
        return sum(bytes_in_blocks(part, element_bytes, scale_bytes, block_size) for part in spec.parts)
    if isinstance(spec, CompressedSpec):
        entries = -(-block_size // spec.ratio)
        return ceil(spec.num_layers * (spec.dim * element_bytes + scale_bytes) * entries / block_size)
    return spec.bytes_per_token(element_bytes, scale_bytes)


def states_in(spec: CacheSpec, cache: KVCache) -> tuple[States, ...]:
    """The recurrent states of a cache that `spec` has allocated."""
    if not isinstance(spec, SeveralCaches):
        return (cache,) if isinstance(spec, StateSpec) else ()
    return tuple(own for part, own in zip(spec.parts, cache, strict=True) if isinstance(part, StateSpec))


def paged_in(spec: CacheSpec, cache: KVCache) -> tuple[KVCache, ...]:
    """The others: what lies in blocks."""
    if not isinstance(spec, SeveralCaches):
        return () if isinstance(spec, StateSpec) else (cache,)
    return tuple(own for part, own in zip(spec.parts, cache, strict=True) if not isinstance(part, StateSpec))


@dataclass(frozen=True)
class ModelCapability:
    """What a family needs from a backend and can promise to a plan."""

    required_ops: frozenset[str]
    """Names of `Ops` methods that the forward pass calls."""
    ops_of_keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """More of them, by the key of a header that has them called where it is there and not 0."""
    max_num_seqs: int | None = None
    """Widest batch the family can run; None is no limit of its own."""
    supports_chunked_prefill: bool = True
    activation_bits: int = 16
    """Fewest bits that rows are rounded to before a matrix multiplies them, unless the user says otherwise. 8 only of a
    family whose layers forgive it, as measured: routers pick others, and gates and states make errors larger (decision
    32)."""
    wide: frozenset[str] = frozenset()
    """Of a family of 8 bits, matrices whose rows need 16, by the last part of their names; the head is `output`."""
    tables: frozenset[str] = frozenset()
    """Last parts of names of tensors of whole numbers, which the family reads itself."""

    @property
    def least_activations(self) -> str:
        """The narrowest of a backend's activations that the family can take: int8, mixed or int16."""
        return "int16" if self.activation_bits > 8 else "mixed" if self.wide else "int8"

    def ops_of(self, metadata: Mapping[str, Any]) -> frozenset[str]:
        """Names of `Ops` methods that the checkpoint of this header needs."""
        architecture = metadata.get("general.architecture")
        more = (ops for key, ops in self.ops_of_keys.items() if metadata.get(f"{architecture}.{key}"))
        return self.required_ops.union(*more)


class Checkpoint(Protocol):
    """The part of a checkpoint that a family reads; `weights.checkpoint.Checkpoint` is the real one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF metadata by key."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensor descriptions by name; each has `name`, `shape` (row-major) and `quant_type`."""

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor; not read while a header alone is judged."""

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor decoded to float32, in its shape."""


class FeedForward(Protocol):
    """The second half of a layer."""

    def add_to(self, x: Tensor, ops: Ops) -> Tensor:
        """x and what the half makes of it: [tokens, hidden] → the same."""


class Model(Protocol):
    """A loaded model: weights bound to one backend's operations."""

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding, and logits of a position."""

    @property
    def kv_spec(self) -> CacheSpec:
        """What the cache that `forward` is given must keep."""

    @property
    def ops(self) -> Ops:
        """What it computes with: a backend's operations, or more about them that its checkpoint asks for."""

    @property
    def head(self) -> Projection:
        """What `logits` multiplies hidden states by; beside it they have a cap at most, see `logit_cap`."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run one flat batch; returns the final hidden states of `batch.logit_rows`: [rows, hidden]."""

    def logits(self, hidden: Tensor) -> Any:
        """Logits of hidden states as float32 numpy: [rows, vocab]."""


def logit_cap(model: Model) -> float | None:
    """What a model with a `logit_cap` does to its logits: they become cap · tanh(logit / cap). None: nothing."""
    cap: float | None = getattr(model, "logit_cap", None)
    return cap


class ModelFamily(Protocol):
    """One architecture: how its header is read and how its model is built."""

    architecture: str
    capability: ModelCapability

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        """Cache shape, from the header alone."""

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        """Longest context the checkpoint was made for, in tokens."""

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Every reason why this checkpoint cannot run in this family, from the header alone; empty when it can."""

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Model:
        """Bind the weights to `ops`; nothing is dequantised or computed later that could be done here."""
