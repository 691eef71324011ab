"""The kernel seam: the coarse operations a model may ask a backend for.

Tensors are the backend's own and opaque above the seam; batches enter as numpy and logits leave as numpy. Every
operation is out of place unless it says otherwise, computes a row independently of the other rows within the backend's
declared `batch_invariant_width`, and is bound once at load: there is no lookup and no fallback per call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import (
    AttentionSpec,
    ForwardBatch,
    IndexerSpec,
    Int32Array,
    LatentAttentionSpec,
)
from pocketllm.engine.backends.api.compressed import Compressor, LimitedExperts, SoftConnection, WindowSpec
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, ScaledExperts
from pocketllm.engine.backends.api.recurrent import DeltaNet, KimiDelta
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.api.streams import HyperConnection

Tensor = Any
"""A backend's own tensor; only that backend's operations touch it."""
Weight = Any
"""A matrix [out, in] as the backend keeps it (packed or not)."""
KVCache = Any
"""Paged keys and values of all layers, as the backend keeps them."""
Selection = Any
"""Which cached tokens each token of a step attends, as the backend says it; used within that step."""
States = Any
"""Recurrent states of all layers in numbered slots, as the backend keeps them."""


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
    is_wide: bool = field(default=False, kw_only=True)
    """Whether rows that meet it keep 16 bits where `mixed` activations round others to 8."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm's weight and epsilon."""

    weight: Tensor
    eps: float


class Ops(Protocol):
    """What a backend offers to model families.

    One that compiles kernels or captures graphs counts them in an attribute `num_compiles` (int, since it was opened):
    a benchmark throws away what was timed while it grew. Without the attribute it is 0.

    One that reads files by itself has `load_stored(stored, quant_type, shape)`, which is given a
    `weights.tensor_file.Stored` instead of bytes, with the shape of a matrix or of experts'. It may read later, until
    `synchronize`; what fails then is raised there, or by a load in between.
    """

    # -- at load ---------------------------------------------------------------------------------------------------
    def load_matrix(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> Weight:
        """Keep a matrix. data: its raw bytes in the file's encoding; shape: (out, in)."""

    def load_experts(self, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int, int]) -> Weight:
        """Keep a matrix of each expert of a layer. shape: (experts, out, in)."""

    def load_vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """Keep a small float32 vector (a norm's weight, a bias, frequencies)."""

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
        """An empty paged cache of num_blocks blocks of block_size tokens for each layer.

        in_windows: a batch's window_table and window_slots say which block is whose, and attention looks at nothing
        that its window hides.
        """

    def new_latent_cache(self, num_layers: int, dim: int, num_blocks: int, block_size: int) -> KVCache:
        """An empty paged cache of one vector of dim values a token and layer, in num_blocks blocks of block_size."""

    def new_compressed_cache(self, num_layers: int, dim: int, ratio: int, num_blocks: int, block_size: int) -> KVCache:
        """An empty paged cache of one vector of dim values for every ratio tokens, in the block where they end."""

    def new_states(self, num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int) -> States:
        """Room for num_slots recurrent states, in float32 and with anything in them.

        Of each layer: conv, the [rows, channels] that its convolution looks back on, and delta, the matrices
        [heads, key_dim, value_dim] of its delta rule.
        """

    # -- each step ---------------------------------------------------------------------------------------------------
    def embed(self, table: Weight, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Tensor:
        """Rows of the embedding table times scale: [tokens, hidden], float32."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019), over each run of len(weight) values of a row:
        the whole row, or each head of it."""

    def layer_norm(self, x: Tensor, norm: Norm, bias: Tensor) -> Tensor:
        """(x - mean) / sqrt(variance + eps) · weight + bias over each whole row (Ba et al. 2016)."""

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
        """Write this step's keys and values into the cache, in place, where the batch says."""

    def attention(self, q: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """Causal attention of each sequence's new tokens over its own cached tokens: [tokens, heads * head_dim]."""

    def project_heads(self, x: Tensor, weight: Weight) -> Tensor:
        """Each head through a matrix of its own: [tokens, heads * in] → [tokens, heads * out].

        weight: [heads, out, in] as `load_experts` gave.
        """

    def store_latent(self, cache: KVCache, layer: int, batch: ForwardBatch, *parts: Tensor) -> None:
        """Write this step's rows, parts side by side, into a latent cache, in place, at `batch.slot_mapping`."""

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        cache: KVCache,
        layer: int,
        batch: ForwardBatch,
        spec: LatentAttentionSpec,
        selection: Selection | None = None,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its cached rows, which are read once for all heads.

        softmax((q_latent · latent + q_rope · key) · scale) · latent. q_latent: [tokens, heads * rank]; q_rope: [tokens,
        heads * rope_dim], of no columns where nothing rotates; the result as q_latent. selection: as `select_keys` or
        `select_pools` gave it in this step; None: all rows.
        """

    def select_keys(
        self, q: Tensor, weights: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selection:
        """Which top_k of its sequence's tokens up to itself each new token attends: those of the highest score.

        Σ over heads of weight · max(q · key, 0); of equal scores the earlier token; all where there are no more than
        top_k. q: [tokens, heads * dim]; weights: [tokens, heads]; cache: a latent cache of keys, this step's included.
        """

    def open_streams(self, x: Tensor, num_streams: int) -> Tensor:
        """Every row so often side by side: [tokens, hidden] → [tokens, num_streams * hidden]."""

    def read_streams(self, streams: Tensor, connection: HyperConnection) -> tuple[Tensor, Tensor]:
        """What a sublayer reads, Σ reading share · stream: [tokens, hidden]; and the shares for `write_streams`."""

    def write_streams(self, streams: Tensor, shares: Tensor, y: Tensor) -> Tensor:
        """Streams after a sublayer: stream[to] = writing share[to] · y + Σ mixing[to, from] · stream[from].

        shares: as `read_streams` gave them for the same streams; y: [tokens, hidden].
        """

    def mean_streams(self, streams: Tensor, num_streams: int) -> Tensor:
        """The mean of a row's streams: [tokens, num_streams * hidden] → [tokens, hidden]."""

    def add_gated(self, streams: Tensor, gates: Tensor, y: Tensor) -> Tensor:
        """stream + 2 · sigmoid(its gate) · y for each stream. gates: [tokens, streams]; y: [tokens, hidden]."""

    def gate_streams(self, keys: Tensor, queries: Tensor, value: Tensor) -> Tensor:
        """sigmoid(±√|key · query / √hidden|) · value for each stream, ± the product's sign and at least 1e-6 under the
        root. keys, queries: [tokens, streams * hidden]; value: [tokens, hidden]; the result as keys."""

    def ngram_embed(self, table: Weight, ngrams: NGrams, states: States, layer: int, batch: ForwardBatch) -> Tensor:
        """Rows of a table for `batch.input_ids` and the tokens before them: [tokens, heads * width].

        Those before this step's are the conv rows of the state in the sequence's slot; left updated, in place.
        """

    def select_groups(self, q: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, index: GroupIndex) -> Selection:
        """Which of its sequence's tokens up to itself each new token attends. q: [tokens, heads * dim], normed and
        rotated; cache: a latent cache of index keys, this step's included."""

    def selected_attention(
        self, q: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec, selection: Selection
    ) -> Tensor:
        """`attention` over a selection of this step."""

    def sink_attention(
        self, q: Tensor, sinks: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """`attention` with one more score in each head's softmax, which has no value. sinks: [heads], not scaled."""

    def rope_last(self, x: Tensor, angles: Tensor, head_dim: int, inverse: bool = False) -> Tensor:
        """Rotate each head's last values as neighbors by its token's angles, or back by them."""

    def compress(
        self,
        values: Tensor,
        gates: Tensor,
        states: States,
        state_layer: int,
        cache: KVCache,
        layer: int,
        batch: ForwardBatch,
        compressor: Compressor,
    ) -> None:
        """Write the entries of groups that end in this step into a compressed cache, in place.

        values, gates: [tokens, width]. Those before this step's are the conv rows of the state in the sequence's slot,
        values beside gates, which are left updated.
        """

    def select_entries(
        self, q: Tensor, weights: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selection:
        """`select_keys` among the entries of whole groups up to each token, for `window_attention`."""

    def select_pools(
        self, q: Tensor, weights: Tensor, cache: KVCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selection:
        """`select_entries`, for `latent_attention`: the tokens of those groups, and those after the last whole one."""

    def window_attention(
        self,
        q: Tensor,
        rows: Tensor,
        sinks: Tensor,
        states: States,
        state_layer: int,
        batch: ForwardBatch,
        spec: WindowSpec,
        cache: KVCache | None = None,
        layer: int = 0,
        selection: Selection | None = None,
    ) -> Tensor:
        """Attention over the latest tokens, and over a compressed cache's entries of whole groups up to each token.

        One softmax over both and over a score more for each head, which has no value. q: [tokens, heads * dim]; rows:
        [tokens, dim], key and value of all heads; sinks: [heads]; selection: as `select_entries` gave it in this step,
        None: all entries. Rows before this step's are the conv rows of the state in the sequence's slot, which are left
        updated, in place.
        """

    def read_soft_streams(self, streams: Tensor, connection: SoftConnection) -> tuple[Tensor, Tensor]:
        """`read_streams` over such a connection; the shares are for `write_streams`, and empty of the head's."""

    def limited_silu_mul(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        """silu(min(gate, limit)) · up within ±limit."""

    def limited_mixture(self, x: Tensor, experts: LimitedExperts, input_ids: npt.NDArray[np.int32]) -> Tensor:
        """`mixture` with such experts. input_ids: [tokens], which routes go by."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, the gate of SwiGLU (Shazeer 2020)."""

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) · up with gelu's tanh form, the gate of GeGLU (Shazeer 2020)."""

    def mixture(self, x: Tensor, experts: Experts) -> Tensor:
        """Σ weight · down(silu(gate x) · up x) over each token's experts (Shazeer et al. 2017).

        [tokens, in] → the same, summed in the order in which a token's experts rank: a row does not depend on the
        routes of others.
        """

    def bounded_mixture(self, x: Tensor, experts: BoundedExperts) -> Tensor:
        """`mixture` with such experts."""

    def scaled_mixture(self, x: Tensor, routed_by: Tensor, experts: ScaledExperts) -> Tensor:
        """`mixture` with such experts, for which the router reads rows of its own: routed_by, [tokens, in]."""

    def causal_conv(
        self,
        x: Tensor,
        kernel: Tensor,
        states: States,
        layer: int,
        batch: ForwardBatch,
        silu: bool,
        dilation: int = 1,
    ) -> Tensor:
        """Σ kernel[c, i] · x[t - (taps - 1 - i) · dilation, c] over each sequence's own tokens: [tokens, channels].

        kernel: [channels, taps]; silu: of the sum. The (taps - 1) · dilation rows before this step's are those of the
        state in the sequence's slot, zeros for a sequence that begins; they are left updated, in place.
        """

    def gated_delta(
        self, mixed: Tensor, step: Tensor, share: Tensor, net: DeltaNet, states: States, layer: int, batch: ForwardBatch
    ) -> Tensor:
        """The gated delta rule over each sequence's tokens, one after another: [tokens, value_heads * value_dim].

        mixed: [tokens, queries | keys | values] of all heads; step and share: logits [tokens, value_heads]. With q and
        k of length one and q divided by √key_dim, a head's S ← exp(rate · softplus(step + time_bias)) · S, then
        S ← S + k ⊗ sigmoid(share) · (v - Sᵀk), and the result is Sᵀq. S is the state in the sequence's slot, zeros for
        a sequence that begins; it is left updated, in place.
        """

    def kimi_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        share: Tensor,
        net: KimiDelta,
        states: States,
        layer: int,
        batch: ForwardBatch,
    ) -> Tensor:
        """`gated_delta` with a decay for each value of a key, and queries, keys and values of as many heads.

        q, k, v: [tokens, heads * dim], the result as v; step: logits of the same shape, share: [tokens, heads]. With
        z = step + time_bias, row i of a head's S is multiplied by exp(lower_bound · sigmoid(-rate · z_i)), or without a
        bound by exp(rate · softplus(z_i)).
        """

    def copy_blocks(self, cache: KVCache, sources: Int32Array, targets: Int32Array) -> None:
        """Copy blocks of all layers of a paged cache in place, one after another in that order."""

    def copy_states(self, states: States, sources: Int32Array, targets: Int32Array) -> None:
        """Copy slots in place, one after another in that order: a target may be a later source."""

    def hadamard(self, x: Tensor, rotation: Hadamard, inverse: bool = False) -> Tensor:
        """Rows rotated, or rotated back; in float32: [tokens, width] → the same."""

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """sigmoid(gate) · x. gate: [tokens, width of x], or [tokens, 1]."""

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y, value by value. y: as x, or one row for all, [width]."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x · factor."""

    def columns(self, x: Tensor, first: int, last: int) -> Tensor:
        """Values [first, last) of every row."""

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
