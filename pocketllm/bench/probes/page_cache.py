"""Files in and out of the kernel's page cache, and how much of one is in it."""

import ctypes
import mmap
import os
from pathlib import Path

from pocketllm.errors import MachineError, OptionError


def require_droppable() -> None:
    """OptionError where a process cannot have files dropped from the page cache."""
    if not hasattr(os, "posix_fadvise"):
        raise OptionError("this system drops no file from its page cache on request: leave the point cold out")


def drop(path: Path) -> None:
    """Have a file's pages leave the cache; MachineError when some stay, as those that another process maps do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = resident_share(path)
    if share > 0.01:
        raise MachineError(f"{share:.0%} of {path.name} stays in the page cache: no cold start can be measured here")


def read_through(path: Path) -> None:
    """Bring a file's pages in."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in memory (mincore); 0 of an empty file."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        start = ctypes.c_char.from_buffer(view)
        pages = -(-size // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * pages)()
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states
        )
        del start  # a view that is still pointed into cannot be closed
    if failed:
        raise MachineError(f"mincore says nothing of {path.name}: {os.strerror(ctypes.get_errno())}")
    return sum(state & 1 for state in states) / pages
