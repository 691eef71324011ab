"""The kernel seam: the coarse operations a model may ask a backend for.

Tensors are the backend's own and opaque above the seam; batches enter as numpy and logits leave as numpy. Every
operation is out of place unless it says otherwise, computes a row independently of the other rows within the backend's
declared `batch_invariant_width`, and is bound once at load: there is no lookup and no fallback per call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch

Tensor = Any
"""A backend's own tensor; only that backend's operations touch it."""
Weight = Any
"""A matrix [out, in] as the backend keeps it (packed or not)."""
KVCache = Any
"""Paged keys and values of all layers, as the backend keeps them."""


class RopeLayout(Enum):
    """Which two values of a head rotate together."""

    ADJACENT = "adjacent"
    """(0, 1), (2, 3), … as in llama's GGUF"""
    HALF_SPLIT = "half_split"
    """(0, d/2), (1, d/2 + 1), … as in qwen and gemma"""


@dataclass(frozen=True)
class Projection:
    """One matrix [out, in] with its optional bias [out]."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """An RMS norm's weight and epsilon."""

    weight: Tensor
    eps: float


class Gating(Enum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    """over all experts"""
    SIGMOID = "sigmoid"
    """of each by itself"""


@dataclass(frozen=True)
class Routing:
    """Which experts a token is sent to, and what each counts; in float32.

    The num_used experts with the highest score + bias, of equal ones the lower index first. An expert's weight is its
    score *without* the bias, divided by the sum over those used when normalized, times scale.
    """

    num_used: int
    gating: Gating
    normalized: bool
    scale: float = 1.0
    bias: Tensor | None = None
    """[experts]"""


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forwards: a router [experts, in], and matrices of all experts as `load_experts` gave."""

    router: Projection
    gate: Weight
    up: Weight
    down: Weight
    routing: Routing


class Ops(Protocol):
    """What a backend offers to model families.

    One that compiles kernels or captures graphs counts them in an attribute `num_compiles` (int, since it was opened):
    a benchmark throws away what was timed while it grew. Without the attribute it is 0.
    """

    # -- at load ---------------------------------------------------------------------------------------------------
    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Weight:
        """Keep a matrix. data: its raw bytes in the file's encoding; shape: (out, in)."""

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> Weight:
        """Keep a matrix of each expert of a layer. shape: (experts, out, in)."""

    def load_vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """Keep a small float32 vector (a norm's weight, a bias, frequencies)."""

    def new_kv_cache(
        self, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int, num_blocks: int, block_size: int
    ) -> KVCache:
        """An empty paged cache of num_blocks blocks of block_size tokens for each layer."""

    # -- each step ---------------------------------------------------------------------------------------------------
    def embed(self, table: Weight, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Tensor:
        """Rows of the embedding table times scale: [tokens, hidden], float32."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), over each run of len(weight) values of a row:
        the whole row, or each head of it."""

    def project(self, x: Tensor, *projections: Projection, norm: Norm | None = None) -> tuple[Tensor, ...]:
        """x · weightᵀ (+ bias) for each projection, x normed first when asked: [tokens, in] → [tokens, out] each.

        Together because norm, and what a backend does to rows before it multiplies them, is then paid once.
        """

    def project_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        """residual + x · weightᵀ (+ bias): [tokens, in] → [tokens, out]."""

    def rope_angles(self, inv_freq: Tensor, positions: npt.NDArray[np.int32], magnitude: float) -> Tensor:
        """cos and sin of position · inv_freq, both times magnitude; made once a step and shared by its layers."""

    def rope(self, x: Tensor, angles: Tensor, head_dim: int, layout: RopeLayout) -> Tensor:
        """Rotate each head's leading values by its token's angles (Su et al. 2021). x: [tokens, heads * head_dim]."""

    def store_kv(self, cache: KVCache, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write this step's keys and values into the cache, in place, at `batch.slot_mapping`."""

    def attention(self, q: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """Causal attention of each sequence's new tokens over its own cached tokens: [tokens, heads * head_dim]."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, the gate of SwiGLU (Shazeer 2020)."""

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) · up with gelu's tanh form, the gate of GeGLU (Shazeer 2020)."""

    def mixture(self, x: Tensor, experts: Experts) -> Tensor:
        """Σ weight · down(silu(gate x) · up x) over each token's experts (Shazeer et al. 2017).

        [tokens, in] → the same, summed in the order in which a token's experts rank: a row does not depend on the
        routes of others.
        """

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""

    def take(self, x: Tensor, rows: npt.NDArray[np.int32]) -> Tensor:
        """Rows of x, in that order."""

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        """A copy as float32 numpy, after everything before it has finished."""

    def synchronize(self) -> None:
        """Return when all operations given so far have finished."""

    # -- once per engine ---------------------------------------------------------------------------------------------
    def capture(self, forward: Callable[[ForwardBatch], Tensor], max_tokens: int) -> Callable[[ForwardBatch], Tensor]:
        """The same function, replayed as fast as this backend can (a command list, a graph) for up to max_tokens.

        `forward` composes operations and hands a batch's fields on to them without looking inside, so that it may be
        called here with a symbolic batch. A result stays valid until the next call.
        """
