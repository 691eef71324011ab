"""Operations over entries of groups of tokens, and over windows beside them."""

from typing import Any

import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.compressed import Compressor, WindowSpec
from pocketllm.engine.backends.cuda.attention import Heads, LastValues
from pocketllm.engine.backends.cuda.layers.compressed.entries import CompressedCache, compress
from pocketllm.engine.backends.cuda.layers.compressed.window import Far, attend
from pocketllm.engine.backends.cuda.layers.latent.attention import Selected
from pocketllm.engine.backends.cuda.layers.latent.kernels.selection import TOKENS
from pocketllm.engine.backends.cuda.layers.latent.selection import select_entries
from pocketllm.engine.backends.cuda.layers.operands import written
from pocketllm.engine.backends.cuda.layers.operations import Operations
from pocketllm.engine.backends.cuda.layers.recurrent.layers import States


class CompressedOps(Operations):
    """What DeepSeek V4 and GLM 5.3 Flash ask for; see `api.ops.Ops`."""

    def new_compressed_cache(
        self, num_layers: int, dim: int, ratio: int, num_blocks: int, block_size: int
    ) -> CompressedCache:
        """Zeros."""
        shape = (num_blocks, -(-block_size // ratio), dim)
        rows = [torch.zeros(shape, dtype=self._unscaled_dtype, device=self._device) for _ in range(num_layers)]
        return CompressedCache(rows, block_size, ratio)

    def compress(
        self,
        values: Any,
        gates: Any,
        states: States,
        state_layer: int,
        cache: CompressedCache,
        layer: int,
        batch: ForwardBatch,
        compressor: Compressor,
    ) -> None:
        kept = states.conv[state_layer]
        compress(written(values), written(gates), kept, cache, layer, self._of(batch), compressor)

    def select_pools(
        self, q: Any, weights: Any, cache: CompressedCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selected:
        where = self._of(batch), spec, cache.block_size, cache.ratio, TOKENS.value
        return select_entries(written(q), written(weights), cache.rows[layer], *where)

    def rope_last(self, x: Any, angles: Tensor, head_dim: int, inverse: bool = False) -> Heads:
        layout = LastValues.BACK if inverse else LastValues.FORWARD
        if isinstance(x, Heads) and x.angles is None and x.head_dim == head_dim:
            return Heads(x.x, head_dim, x.norm, angles, layout)
        return Heads(written(x), head_dim, None, angles, layout)

    def select_entries(
        self, q: Any, weights: Any, cache: CompressedCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Selected:
        where = self._of(batch), spec, cache.block_size, cache.ratio
        return select_entries(written(q), written(weights), cache.rows[layer], *where)

    def window_attention(
        self,
        q: Any,
        rows: Any,
        sinks: Tensor,
        states: States,
        state_layer: int,
        batch: ForwardBatch,
        spec: WindowSpec,
        cache: CompressedCache | None = None,
        layer: int = 0,
        selection: Selected | None = None,
    ) -> Tensor:
        heads = q if isinstance(q, Heads) else Heads(written(q), spec.dim)
        far = None if cache is None else Far(cache, layer, selection)
        kept, in_splits = states.conv[state_layer], self._are_few(len(heads.x))
        return attend(heads, written(rows), sinks, kept, self._of(batch), spec, far, self._unscaled_dtype, in_splits)
