"""Paged caches in the native library's memory."""

import ctypes

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.cpu.library import Engine, Native

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
"""What keys and values are kept as, in the order of native/kernels.h, `KvDtype`; int8 with a scale for each head."""


class PagedCache(Native):
    """Blocks of all layers."""

    def memory(self) -> npt.NDArray[np.uint8]:
        """All of its bytes, to look at and to write on in tests."""
        size = ctypes.c_int64()
        data = self.needs[0].library.kv_data(self.address, ctypes.byref(size))
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)), (size.value,))


class KVCache(PagedCache):
    """Paged keys and values of all layers."""

    def __init__(
        self, engine: Engine, dtype: int, num_layers: int, kv_heads: int, key_dim: int, value_dim: int, *blocks: int
    ) -> None:
        self.kv_heads, self.key_dim, self.value_dim = kv_heads, key_dim, value_dim
        new = engine.library.kv_new(dtype, num_layers, kv_heads, key_dim, value_dim, *blocks)
        super().__init__(new, engine.library.kv_free, engine)


class LatentCache(PagedCache):
    """Paged rows [latent | rotated key] of all layers."""

    def __init__(self, engine: Engine, dtype: int, num_layers: int, dim: int, *blocks: int) -> None:
        self.dim = dim
        new = engine.library.latent_new(dtype, num_layers, dim, *blocks)
        super().__init__(new, engine.library.kv_free, engine)
