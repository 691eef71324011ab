"""The operations of `api.ops` in plain torch, float32 throughout."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.attention import (
    AttentionSpec,
    ForwardBatch,
    IndexerSpec,
    LatentAttentionSpec,
)
from pocketllm.engine.backends.api.compressed import Compressor, LimitedExperts, SoftConnection, WindowSpec
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, ScaledExperts
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout
from pocketllm.engine.backends.api.recurrent import DeltaNet, KimiDelta
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.reference import compressed, indexed
from pocketllm.engine.backends.reference import latent as mla
from pocketllm.engine.backends.reference import streams as residual
from pocketllm.engine.backends.reference.attention import PagedCache, StepPlan, paged_attention, plan_step
from pocketllm.engine.backends.reference.memory import MemoryOps
from pocketllm.engine.backends.reference.mixture import (
    bounded_outputs,
    expert_outputs,
    gelu_outputs,
    route,
    weighted_sum,
)
from pocketllm.engine.backends.reference.recurrent import (
    StateSlots,
    convolve,
    delta_rule,
    kimi_delta_rule,
)
from pocketllm.engine.backends.reference.rows import pad_rows, product


class ReferenceOps(MemoryOps):
    """Every operation, obviously right; other backends are held to it one by one."""

    def __init__(self) -> None:
        self._step: StepPlan | None = None

    def embed(self, table: Tensor, input_ids: npt.NDArray[np.int32], scale: float = 1.0) -> Tensor:
        rows = table[torch.from_numpy(input_ids)]
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        runs = x.view(len(x), x.shape[-1] // len(norm.weight), len(norm.weight))
        return functional.rms_norm(runs, norm.weight.shape, norm.weight, norm.eps).view(x.shape)

    def layer_norm(self, x: Tensor, norm: Norm, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, norm.weight.shape, norm.weight, bias, norm.eps)

    def project(self, x: Tensor, *projections: Projection, norm: Norm | None = None) -> tuple[Tensor, ...]:
        """Few rows are padded, so that a row does not depend on how many there are (`rows`)."""
        padded = pad_rows(x if norm is None else self.rms_norm(x, norm))
        parts = (product(padded, projection.weight)[: len(x)] for projection in projections)
        return tuple(
            y if projection.bias is None else y + projection.bias
            for y, projection in zip(parts, projections, strict=True)
        )

    def project_add(self, x: Tensor, projection: Projection, residual: Tensor) -> Tensor:
        return residual + self.project(x, projection)[0]

    def rope_angles(self, inv_freq: Tensor, positions: npt.NDArray[np.int32], magnitude: float) -> Tensor:
        """[2, tokens, 1, frequencies]: cosines and sines, the angle in float64 before it is rounded."""
        angle = torch.from_numpy(positions).double()[:, None, None] * inv_freq.double()
        return torch.stack([angle.cos(), angle.sin()]).mul_(magnitude).float()

    def rope(self, x: Tensor, angles: Tensor, head_dim: int, layout: RopeLayout) -> Tensor:
        cos, sin = angles
        rotated = 2 * cos.shape[-1]
        heads = x.view(len(x), -1, head_dim)
        out = heads.clone()
        if layout is RopeLayout.ADJACENT:
            pick = (slice(0, rotated, 2), slice(1, rotated, 2))
        else:
            pick = (slice(0, rotated // 2), slice(rotated // 2, rotated))
        first, second = heads[..., pick[0]], heads[..., pick[1]]
        out[..., pick[0]] = first * cos - second * sin
        out[..., pick[1]] = second * cos + first * sin
        return out.view(len(x), -1)

    def store_kv(self, cache: PagedCache, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        slots = self._plan(batch, cache.block_size, cache.in_windows).slots
        for kept, new in ((cache.keys[layer], k), (cache.values[layer], v)):
            flat = kept.view(-1, kept.shape[2] * kept.shape[3])
            flat.index_copy_(0, slots, new)

    def attention(self, q: Tensor, cache: PagedCache, layer: int, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        return paged_attention(q, cache, layer, self._plan(batch, cache.block_size, cache.in_windows), spec)

    def project_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return mla.project_heads(x, weight)

    def store_latent(self, cache: mla.LatentCache, layer: int, batch: ForwardBatch, *parts: Tensor) -> None:
        rows = cache.rows[layer]
        slots = self._plan(batch, cache.block_size).slots
        rows.view(-1, rows.shape[-1]).index_copy_(0, slots, torch.cat(parts, -1))

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        cache: mla.LatentCache,
        layer: int,
        batch: ForwardBatch,
        spec: LatentAttentionSpec,
        selection: Sequence[Tensor] | None = None,
    ) -> Tensor:
        step = self._plan(batch, cache.block_size)
        return mla.latent_attention(q_latent, q_rope, cache.rows[layer], step, spec, selection)

    def select_keys(
        self,
        q: Tensor,
        weights: Tensor,
        cache: mla.LatentCache,
        layer: int,
        batch: ForwardBatch,
        spec: IndexerSpec,
    ) -> list[Tensor]:
        return mla.select_keys(q, weights, cache.rows[layer], self._plan(batch, cache.block_size), spec)

    def open_streams(self, x: Tensor, num_streams: int) -> Tensor:
        return x.repeat(1, num_streams)

    def read_streams(self, streams: Tensor, connection: HyperConnection) -> tuple[Tensor, Tensor]:
        normed = functional.rms_norm(streams, streams.shape[-1:], eps=connection.norm_eps)
        reading, shares = residual.shares_of(self.project(normed, connection.weight)[0], connection)
        return residual.read(streams, reading), shares

    def write_streams(self, streams: Tensor, shares: Tensor, y: Tensor) -> Tensor:
        return residual.write(streams, shares, y)

    def mean_streams(self, streams: Tensor, num_streams: int) -> Tensor:
        return residual.total(streams.chunk(num_streams, -1)) / num_streams

    def add_gated(self, streams: Tensor, gates: Tensor, y: Tensor) -> Tensor:
        return indexed.add_gated(streams, gates, y)

    def gate_streams(self, keys: Tensor, queries: Tensor, value: Tensor) -> Tensor:
        return indexed.gate_streams(keys, queries, value)

    def ngram_embed(self, table: Tensor, ngrams: NGrams, states: StateSlots, layer: int, batch: ForwardBatch) -> Tensor:
        return table[indexed.ngram_rows(ngrams, states.conv[layer], batch)].view(batch.num_tokens, -1)

    def select_groups(
        self, q: Tensor, cache: mla.LatentCache, layer: int, batch: ForwardBatch, index: GroupIndex
    ) -> Sequence[Tensor]:
        return indexed.select_groups(q, cache.rows[layer], self._plan(batch, cache.block_size), index)

    def selected_attention(
        self,
        q: Tensor,
        cache: PagedCache,
        layer: int,
        batch: ForwardBatch,
        spec: AttentionSpec,
        selection: Sequence[Tensor],
    ) -> Tensor:
        return indexed.selected_attention(q, cache, layer, self._plan(batch, cache.block_size), spec, selection)

    def sink_attention(
        self, q: Tensor, sinks: Tensor, cache: PagedCache, layer: int, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        return paged_attention(q, cache, layer, self._plan(batch, cache.block_size, cache.in_windows), spec, sinks)

    def rope_last(self, x: Tensor, angles: Tensor, head_dim: int, inverse: bool = False) -> Tensor:
        cos, sin = angles
        heads = x.view(len(x), x.shape[-1] // head_dim, head_dim)
        return compressed.turned(heads, cos, sin, inverse).view(x.shape)

    def compress(
        self,
        values: Tensor,
        gates: Tensor,
        states: StateSlots,
        state_layer: int,
        cache: compressed.CompressedCache,
        layer: int,
        batch: ForwardBatch,
        compressor: Compressor,
    ) -> None:
        rows = torch.cat([values, gates], -1)
        compressed.compress(rows, states.conv[state_layer], cache, layer, batch, compressor)

    def select_entries(
        self,
        q: Tensor,
        weights: Tensor,
        cache: compressed.CompressedCache,
        layer: int,
        batch: ForwardBatch,
        spec: IndexerSpec,
    ) -> Sequence[Tensor | None]:
        return compressed.select_entries(q, weights, cache, layer, batch, spec)

    def select_pools(
        self,
        q: Tensor,
        weights: Tensor,
        cache: compressed.CompressedCache,
        layer: int,
        batch: ForwardBatch,
        spec: IndexerSpec,
    ) -> Sequence[Tensor]:
        return compressed.select_pools(q, weights, cache, layer, self._plan(batch, cache.block_size), spec)

    def window_attention(
        self,
        q: Tensor,
        rows: Tensor,
        sinks: Tensor,
        states: StateSlots,
        state_layer: int,
        batch: ForwardBatch,
        spec: WindowSpec,
        cache: compressed.CompressedCache | None = None,
        layer: int = 0,
        selection: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        entries = None if cache is None else compressed.attended(cache, layer, batch, selection)
        return compressed.window_attention(q, rows, sinks, states.conv[state_layer], batch, spec, entries)

    def read_soft_streams(self, streams: Tensor, connection: SoftConnection) -> tuple[Tensor, Tensor]:
        normed = functional.rms_norm(streams, streams.shape[-1:], eps=connection.norm_eps)
        reading, shares = compressed.soft_shares(self.project(normed, connection.weight)[0], connection)
        return residual.read(streams, reading), shares

    def limited_silu_mul(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return compressed.limited_silu_mul(gate, up, limit)

    def limited_mixture(self, x: Tensor, experts: LimitedExperts, input_ids: npt.NDArray[np.int32]) -> Tensor:
        routes = None if experts.routes is None else torch.from_numpy(experts.routes[input_ids].astype(np.int64))
        logits = self.project(x, experts.experts.router)[0]
        chosen, weights = route(logits, experts.experts.routing, routes)
        return weighted_sum(compressed.limited_outputs(x, chosen, experts), weights)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate / (1 + exp(-gate)) · up, spelled out: torch's own silu rounds the last few elements of a tensor
        another way than the rest, so a row would depend on how many rows there are."""
        return (gate / gate.neg().exp_().add_(1)).mul_(up)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """0.5 · gate · (1 + tanh(√(2/π) · (gate + 0.044715 · gate³))) · up, spelled out for `silu_mul`'s reason."""
        inner = (gate + 0.044715 * gate * gate * gate) * math.sqrt(2 / math.pi)
        # tanh(z) = 1 - 2 / (exp(2z) + 1): no vectorised tanh whose last elements could round otherwise
        return (gate * (1 - 1 / (inner.mul_(2).exp_() + 1))).mul_(up)

    def mixture(self, x: Tensor, experts: Experts) -> Tensor:
        chosen, weights = route(self.project(x, experts.router)[0], experts.routing)
        return weighted_sum(expert_outputs(x, chosen, experts.gate, experts.up, experts.down), weights)

    def bounded_mixture(self, x: Tensor, experts: BoundedExperts) -> Tensor:
        chosen, weights = route(self.project(x, experts.experts.router)[0], experts.experts.routing)
        return weighted_sum(bounded_outputs(x, chosen, experts), weights)

    def scaled_mixture(self, x: Tensor, routed_by: Tensor, experts: ScaledExperts) -> Tensor:
        own = experts.experts
        chosen, weights = route(self.project(routed_by, own.router)[0], own.routing)
        return weighted_sum(gelu_outputs(x, chosen, own, self.gelu_mul), weights * experts.scale[chosen])

    def causal_conv(
        self,
        x: Tensor,
        kernel: Tensor,
        states: StateSlots,
        layer: int,
        batch: ForwardBatch,
        silu: bool,
        dilation: int = 1,
    ) -> Tensor:
        mixed = convolve(x, kernel, states.conv[layer], batch, dilation)
        # spelled out as in `silu_mul`
        return mixed.div_(mixed.neg().exp_().add_(1)) if silu else mixed

    def gated_delta(
        self,
        mixed: Tensor,
        step: Tensor,
        share: Tensor,
        net: DeltaNet,
        states: StateSlots,
        layer: int,
        batch: ForwardBatch,
    ) -> Tensor:
        return delta_rule(mixed, step, share, net, states.delta[layer], batch)

    def kimi_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        share: Tensor,
        net: KimiDelta,
        states: StateSlots,
        layer: int,
        batch: ForwardBatch,
    ) -> Tensor:
        return kimi_delta_rule(q, k, v, step, share, net, states.delta[layer], batch)

    def hadamard(self, x: Tensor, rotation: Hadamard, inverse: bool = False) -> Tensor:
        """Sums and differences of halves, log2(block) times (Fino & Algazi 1976)."""
        signs: Tensor = rotation.signs
        mixed = x if inverse else x * signs
        runs = mixed.reshape(-1, rotation.block)
        half = rotation.block // 2
        while half:
            pairs = runs.view(len(runs), -1, 2, half)
            runs = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
            runs = runs.view(-1, rotation.block)
            half //= 2
        mixed = runs.view(x.shape) / math.sqrt(rotation.block)
        return mixed * signs if inverse else mixed

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """x / (1 + exp(-gate)), spelled out for `silu_mul`'s reason."""
        return x / gate.neg().exp_().add_(1)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def columns(self, x: Tensor, first: int, last: int) -> Tensor:
        return x[:, first:last]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def take(self, x: Tensor, rows: npt.NDArray[np.int32]) -> Tensor:
        return x[torch.from_numpy(rows)]

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        return x.numpy().astype(np.float32)

    def synchronize(self) -> None:
        """Every call has finished when it returns."""

    def capture(self, forward: Callable[[ForwardBatch], Tensor], max_tokens: int) -> Callable[[ForwardBatch], Tensor]:
        """The function itself: plain torch has nothing to replay."""
        return forward

    def _plan(self, batch: ForwardBatch, block_size: int, in_windows: bool = False) -> StepPlan:
        """The batch as tensors, made at a step's first layer; a batch is immutable, so its identity is its key.

        block_size: any cache's, as the caches of a model have the same blocks.
        """
        step = self._step
        if step is None or step.batch is not batch:
            step = self._step = plan_step(batch, block_size)
        if not in_windows:
            return step
        assert step.windows is not None, "a batch without its windows' blocks"
        return step.windows
