"""What groups of operations that live in folders of their own need of `ops.CudaOps`, whose bases they are."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.cuda.products import FEW_ROWS, Products
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch, to_device, upload


class Operations:
    """The device, the products, and a step's batch there."""

    _device: torch.device
    _kv_dtype: torch.dtype
    _products: Products
    _batch: tuple[ForwardBatch, DeviceBatch] | None
    _constants: dict[tuple[int, ...], tuple[Any, Any]]
    """What is made once of small things that a model holds, by their identities, with those things: tables that
    captured steps read stay where they are."""

    @property
    def _unscaled_dtype(self) -> torch.dtype:
        """Of caches whose kernels know no scales; the plan refuses those where numbers have eight bits."""
        assert self._kv_dtype.itemsize > 1, self._kv_dtype
        return self._kv_dtype

    def _are_few(self, rows: int) -> bool:
        """Whether rows are those of a decode step, in which all are computed alike."""
        return rows <= FEW_ROWS and not self._products.is_prompt

    def _on_device(self, values: npt.NDArray[np.int32] | Tensor) -> Tensor:
        return values if isinstance(values, Tensor) else upload(values, self._device)

    def _of(self, batch: ForwardBatch | DeviceBatch) -> DeviceBatch:
        """The batch on the device, copied once a step; a batch is immutable, so its identity is its key."""
        if isinstance(batch, DeviceBatch):
            return batch
        if self._batch is None or self._batch[0] is not batch:
            self._batch = batch, to_device(batch, self._device)
        return self._batch[1]
