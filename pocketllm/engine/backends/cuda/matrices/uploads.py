"""File bytes on their way to the device: threads copy the next piece to pinned memory while the last one is on the bus.

Bytes of a mapped file are read by whoever touches them first: several threads wait for several pages at once.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COPIERS = 8
"""Threads, where there are so many cores."""
UNDER_WAY = 4
"""Pieces that may be on the bus or in use there before another one is sent: pinned memory is not for the whole file."""


class Piece(NamedTuple):
    """Host memory that is being filled."""

    memory: Tensor
    copies: Sequence[Future[None]]
    shape: tuple[int, ...]

    def sent(self, device: torch.device) -> Tensor:
        """The same on the device, in the order of the current stream."""
        for copy in self.copies:
            copy.result()
        return self.memory.to(device, non_blocking=True).view(self.shape)


def pieces(rows: npt.NDArray[np.uint8], step: int, device: torch.device) -> Iterator[Tensor]:
    """Bytes on the device, `step` of the first dimension at a time; while one is worked on, the next is copied."""
    under_way: deque[torch.cuda.Event] = deque()
    ahead: Piece | None = None
    for at in range(0, len(rows), step):
        piece = ahead or being_copied(rows[at : at + step], device)
        ahead = being_copied(rows[at + step : at + 2 * step], device) if at + step < len(rows) else None
        yield piece.sent(device)
        if device.type == "cuda":
            if len(under_way) == UNDER_WAY:
                under_way.popleft().synchronize()
            under_way.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch has no types for it
            under_way[-1].record()


def being_copied(rows: npt.NDArray[np.uint8], device: torch.device) -> Piece:
    """Memory that the copiers fill, each a part of it; pinned where a GPU will read it."""
    flat = rows.reshape(-1)
    memory = torch.empty(flat.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, pool = memory.numpy(), copiers()
    bounds = np.linspace(0, flat.size, COPIERS + 1).astype(int).tolist()
    copies = [pool.submit(np.copyto, target[begin:end], flat[begin:end]) for begin, end in pairwise(bounds)]
    return Piece(memory, copies, rows.shape)


@cache
def copiers() -> ThreadPoolExecutor:
    """Threads that copy; numpy lets go of the interpreter's lock meanwhile."""
    return ThreadPoolExecutor(min(COPIERS, os.cpu_count() or 1), thread_name_prefix="copier")
