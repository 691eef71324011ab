"""A checkpoint while its tensors are loaded: how far that is."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.checkpoint import Checkpoint
from pocketllm.engine.weights.gguf import Metadata, TensorInfo
from pocketllm.engine.weights.tensor_file import Stored

Amount = Callable[[int, int], None]
"""Bytes done, and bytes in all."""


@dataclass
class Reading:
    """Hands out a checkpoint's tensors and tells how much of them that was."""

    checkpoint: Checkpoint
    amount: Amount
    interval_s: float = 0.1
    """Least time between two calls of `amount`."""
    done: int = 0
    _last: str | None = None
    _told_s: float = field(default_factory=time.perf_counter)

    @property
    def metadata(self) -> Metadata:
        return self.checkpoint.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor, read-only; CheckpointError where the file was cut short since it was opened."""
        self._next(name)
        return self.checkpoint.data(name)

    def stored(self, name: str) -> Stored | None:
        """What `data` gives, still in the file; None where it is not there in that form."""
        self._next(name)
        return self.checkpoint.stored(name)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor decoded to float32, in its shape."""
        self._next(name)
        return self.checkpoint.values(name)

    def _next(self, name: str) -> None:
        if name == self._last:
            return
        if self._last is not None:
            self.done += self.checkpoint.tensor(self._last).num_bytes
        self._last = name
        now_s = time.perf_counter()
        if now_s - self._told_s >= self.interval_s:
            self._told_s = now_s
            self.amount(self.done, self.checkpoint.num_bytes)

    def finish(self) -> None:
        """Everything was read; CheckpointError where the files are no longer what was opened."""
        self.checkpoint.check_unchanged()
