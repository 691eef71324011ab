"""All that the lifecycle knows of a model: what a family declares, and what a loaded model does.

A family is one file under `families/`, named after its GGUF architecture with `-` written `_`, that ends with a
constant `FAMILY`. It imports no torch: it computes by composing the operations of `backends.api.ops`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Ops, Tensor


@dataclass(frozen=True)
class KVSpec:
    """Shape of the paged key/value cache: what one token of one sequence keeps.

    `num_layers` layers, each with `num_kv_heads` heads of `key_dim` + `value_dim` values.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, element_bytes: float, scale_bytes: int = 0) -> int:
        """Bytes that one token adds to the cache over all layers; scale_bytes: beside each head's key and value."""
        each = (self.key_dim + self.value_dim) * element_bytes + 2 * scale_bytes
        return ceil(self.num_layers * self.num_kv_heads * each)


@dataclass(frozen=True)
class ModelCapability:
    """What a family needs from a backend and can promise to a plan."""

    required_ops: frozenset[str]
    """Names of `Ops` methods that the forward pass calls."""
    max_num_seqs: int | None = None
    """Widest batch the family can run; None is no limit of its own."""
    supports_chunked_prefill: bool = True


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


class Model(Protocol):
    """A loaded model: weights bound to one backend's operations."""

    kv_spec: KVSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run one flat batch; returns the final hidden states of `batch.logit_rows`: [rows, hidden]."""

    def logits(self, hidden: Tensor) -> Any:
        """Logits of hidden states as float32 numpy: [rows, vocab]."""


class ModelFamily(Protocol):
    """One architecture: how its header is read and how its model is built."""

    architecture: str
    capability: ModelCapability

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        """Cache shape, from the header alone."""

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        """Longest context the checkpoint was made for, in tokens."""

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Every reason why this checkpoint cannot run in this family, from the header alone; empty when it can."""

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Model:
        """Bind the weights to `ops`; nothing is dequantised or computed later that could be done here."""
