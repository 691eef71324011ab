"""Operations over a cache of rows that all heads share."""

from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.cuda.attention import Heads
from pocketllm.engine.backends.cuda.layers.latent.attention import LatentCache, Selected, attend, store
from pocketllm.engine.backends.cuda.layers.latent.heads import project_heads
from pocketllm.engine.backends.cuda.layers.latent.selection import select_entries
from pocketllm.engine.backends.cuda.layers.operands import written
from pocketllm.engine.backends.cuda.layers.operations import Operations
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices


class LatentOps(Operations):
    """Multi-head latent attention."""

    def new_latent_cache(self, num_layers: int, dim: int, num_blocks: int, block_size: int) -> LatentCache:
        """Zeros."""
        shape = (num_blocks, block_size, dim)
        rows = [torch.zeros(shape, dtype=self._unscaled_dtype, device=self._device) for _ in range(num_layers)]
        return LatentCache(rows)

    def project_heads(self, x: Any, weight: ExpertMatrices) -> Tensor:
        rows = written(x)
        return project_heads(rows, weight, self._are_few(len(rows)), self._products.is_invariant)

    def store_latent(self, cache: LatentCache, layer: int, batch: ForwardBatch, *parts: Any) -> None:
        first, *rest = (self._heads(part) for part in parts)
        assert len(rest) <= 1, "rows have at most two parts"
        store(cache.rows[layer], self._of(batch).slot_mapping, first, rest[0] if rest else None)

    def latent_attention(
        self, q_latent: Any, q_rope: Any, cache: LatentCache, layer: int, batch: ForwardBatch,
        spec: LatentAttentionSpec, selection: Selected | None = None,
    ) -> Tensor:  # fmt: skip
        latent = written(q_latent)
        rotated = q_rope if isinstance(q_rope, Heads) and q_rope.norm is None else self._heads(q_rope, spec.rope_dim)
        are_few, is_invariant = self._are_few(len(latent)), self._products.is_invariant
        return attend(latent, rotated, cache.rows[layer], self._of(batch), spec, selection, are_few, is_invariant)

    def select_keys(
        self, q: Any, weights: Any, cache: LatentCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selected:
        return select_entries(written(q), written(weights), cache.rows[layer], self._of(batch), spec, cache.block_size)

    def layer_norm(self, x: Any, norm: Norm, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(written(x), norm.weight.shape, norm.weight, bias, norm.eps)

    def _heads(self, x: Any, head_dim: int | None = None) -> Heads:
        """Rows as heads; head_dim: of each, where it is not the whole row."""
        width = x.x.shape[1] if isinstance(x, Heads) else None
        if isinstance(x, Heads) and x.head_dim == (head_dim or width):
            return x
        rows = written(x)
        return Heads(rows, head_dim or rows.shape[1])
