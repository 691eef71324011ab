"""Paged caches in the native library's memory."""

import ctypes

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.cpu.library import Engine, Native

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
"""What keys and values are kept as, in the order of native/kernels.h, `KvDtype`; int8 with a scale for each head."""


class PagedCache(Native):
    """Blocks of all layers."""

    num_blocks: int

    def memory(self) -> npt.NDArray[np.uint8]:
        """All of its bytes, to look at and to write on in tests."""
        return self._memory()[0]

    def blocks(self) -> npt.NDArray[np.uint8]:
        """Each block's bytes, of all layers: [blocks, bytes]."""
        memory, block_bytes = self._memory()
        return memory[: self.num_blocks * block_bytes].reshape(self.num_blocks, block_bytes)

    def _memory(self) -> tuple[npt.NDArray[np.uint8], int]:
        """Its bytes, and how many of them a block has."""
        sizes = (ctypes.c_int64 * 2)()
        data = self.needs[0].library.kv_data(self.address, sizes)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)), (sizes[0],)), sizes[1]


class KVCache(PagedCache):
    """Paged keys and values of all layers."""

    def __init__(
        self, engine: Engine, dtype: int, num_layers: int, kv_heads: int, key_dim: int, value_dim: int, *blocks: int
    ) -> None:
        """blocks: how many, of how many tokens, and whether they are in windows."""
        self.kv_heads, self.key_dim, self.value_dim, self.num_blocks = kv_heads, key_dim, value_dim, blocks[0]
        new = engine.library.kv_new(dtype, num_layers, kv_heads, key_dim, value_dim, *blocks)
        super().__init__(new, engine.library.kv_free, engine)


class LatentCache(PagedCache):
    """Paged rows [latent | rotated key] of all layers."""

    def __init__(self, engine: Engine, dtype: int, num_layers: int, dim: int, *blocks: int) -> None:
        self.dim, self.num_blocks = dim, blocks[0]
        new = engine.library.latent_new(dtype, num_layers, dim, *blocks)
        super().__init__(new, engine.library.kv_free, engine)


class CompressedCache(PagedCache):
    """Paged entries of all layers, one for every `ratio` tokens, each in the block where its tokens end."""

    def __init__(self, engine: Engine, dtype: int, num_layers: int, dim: int, ratio: int, *blocks: int) -> None:
        self.dim, self.ratio, self.num_blocks = dim, ratio, blocks[0]
        new = engine.library.compressed_new(dtype, num_layers, dim, ratio, *blocks)
        super().__init__(new, engine.library.kv_free, engine)
