"""Operations over entries of groups of tokens."""

from typing import Any

import torch

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.compressed import Compressor
from pocketllm.engine.backends.cuda.layers.compressed.entries import CompressedCache, compress
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
        rows = [torch.zeros(shape, dtype=self._kv_dtype, device=self._device) for _ in range(num_layers)]
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
