"""File bytes on their way to the device: threads read pieces to pinned memory while earlier ones are on the bus.

Whoever loads names the next matrix while pieces of the last ones are still being read, so that threads and bus have
work from the first to the last byte of a checkpoint, in whatever order its tensors are asked for.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

READERS = 12
"""Threads, where there are so many cores; each reads a piece of its own."""
AHEAD = READERS + 2
"""Pieces that are named and not used yet: a thread that is done finds the next one before the oldest is used."""
UNDER_WAY = 2
"""Pieces on the bus or in use there before the next one waits: pinned memory is not for the whole file."""
PIECE_BYTES = 1 << 24
"""Of a piece, where a tile of rows is not more: a power of two, which torch's pinned blocks are rounded up to."""


class Source(Protocol):
    """Bytes that are read in any thread; `weights.tensor_file.Stored` is one."""

    def read_into(self, memory: npt.NDArray[np.uint8], first: int) -> None:
        """Fill memory with the bytes from `first` on."""


class Array(NamedTuple):
    """Bytes that are in memory already."""

    data: npt.NDArray[np.uint8]

    def read_into(self, memory: npt.NDArray[np.uint8], first: int) -> None:
        """A copy of some; numpy lets go of the interpreter's lock meanwhile."""
        np.copyto(memory, self.data[first : first + memory.nbytes])


class Piece(NamedTuple):
    """Host memory that is being filled, and what to do with it then."""

    memory: Future[Tensor]
    use: Callable[[Tensor], None]


class Uploads:
    """Pieces that are being read, in the order in which they will be used, by the thread that named them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reading: deque[Piece] = deque()
        self._under_way: deque[torch.cuda.Event] = deque()
        self.num_failures = 0
        """Loads that ended in an error; what they had named is not used any more."""

    def add(self, source: Source, first: int, count: int, use: Callable[[Tensor], None]) -> None:
        """Read `count` bytes from `first` on; use: is given them, on the host, in the order of calls."""
        if len(self._reading) >= AHEAD:
            self._use_next()
        memory = readers().submit(read, source, first, count, self.device.type == "cuda")
        self._reading.append(Piece(memory, use))

    def read_all(self) -> None:
        """Return when all that is named has been read; errors are told where it is used."""
        wait([piece.memory for piece in self._reading])

    def finish(self) -> None:
        """Use what is still being read; the device may be at it when this returns."""
        while self._reading:
            self._use_next()

    def _use_next(self) -> None:
        memory, use = self._reading.popleft()
        try:
            use(memory.result())
        except BaseException:
            self._give_up()
            raise
        if self.device.type == "cuda":
            if len(self._under_way) == UNDER_WAY:
                self._under_way.popleft().synchronize()
            self._under_way.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch has no types for it
            self._under_way[-1].record()

    def _give_up(self) -> None:
        for piece in self._reading:
            piece.memory.cancel()
        self._reading.clear()
        self.num_failures += 1


def read(source: Source, first: int, count: int, is_pinned: bool) -> Tensor:
    """Bytes in memory of their own, pinned where a GPU will read it."""
    memory = new_memory(count, is_pinned)
    source.read_into(memory.numpy(), first)
    return memory


def new_memory(count: int, is_pinned: bool) -> Tensor:
    """So many bytes on the host; pinned ones in blocks of one size, which torch keeps and gives again."""
    return torch.empty(max(PIECE_BYTES, count) if is_pinned else count, dtype=torch.uint8, pin_memory=is_pinned)[:count]


def spans(count: int, most: int) -> Sequence[tuple[int, int]]:
    """So many things as ranges of at most `most`, about equally long: [first, last).

    >>> spans(9, 4)
    [(0, 3), (3, 6), (6, 9)]
    """
    step = -(-count // -(-count // max(1, most)))
    return [(first, min(count, first + step)) for first in range(0, count, step)]


@cache
def readers() -> ThreadPoolExecutor:
    """Threads that read."""
    return ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), thread_name_prefix="reader")
