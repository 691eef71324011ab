"""Memory of the CPU backend is touched ahead of its use: as far as is promised, and no further."""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pocketllm.engine.backends.api.attention import ForwardBatch
from tests.native import cpu_ops
from tests.unit.test_cpu_program import script
from tests.unit.test_ops import normal, one_sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no-mincore: which pages are there is read on Linux")
PAGE = 4096
HUGE_PAGE = 2 << 20
AHEAD = 32 << 20
"""kTouchedAhead in native/runtime/memory/touch.h."""
BLOCK_SIZE, HEADS, DIM = 16, 8, 64
BLOCK_BYTES = BLOCK_SIZE * HEADS * 2 * DIM * 2 * 4
"""Of keys and values in float16 of four layers: 128 KiB."""


def new_cache(ops: Any, num_bytes: int) -> Any:
    return ops.new_kv_cache(4, HEADS, DIM, DIM, num_bytes // BLOCK_BYTES, BLOCK_SIZE)


def use(ops: Any, cache: Any, block: int) -> None:
    """Write a key and a value to a block."""
    row = normal(1, HEADS * DIM)
    slot = np.array([block * BLOCK_SIZE], np.int64)
    ops.store_kv(cache, 0, row, row, replace(one_sequence(1, 0, [block], BLOCK_SIZE), slot_mapping=slot))


def resident(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which of an array's pages are there, the first and last as far as they lie in it."""
    begin = memory.ctypes.data // PAGE * PAGE
    found = np.zeros(-(-(memory.ctypes.data + memory.nbytes - begin) // PAGE), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(found) * PAGE), ctypes.c_void_p(found.ctypes.data)) == 0
    return (found & 1).astype(bool)


def wait_until(holds: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s, "it was not touched"
        time.sleep(0.01)


# -- caches ------------------------------------------------------------------------------------------------------------
def test_a_cache_is_there_so_far_ahead_of_what_is_used_and_no_further() -> None:
    ops = cpu_ops()
    cache = new_cache(ops, 4 * AHEAD)
    memory = cache.memory()
    for used in (0, AHEAD):
        if used:
            use(ops, cache, used // BLOCK_BYTES - 1)
        wait_until(lambda end=used + AHEAD: resident(memory[:end]).all())
        time.sleep(0.05)

        assert not resident(memory[used + AHEAD + HUGE_PAGE :]).any()


def test_a_cache_is_touched_to_its_end_and_no_further() -> None:
    ops = cpu_ops()
    cache = new_cache(ops, AHEAD + HUGE_PAGE)
    use(ops, cache, AHEAD // BLOCK_BYTES)

    wait_until(lambda: resident(cache.memory()).all())


def test_touching_leaves_what_was_written() -> None:
    ops = cpu_ops()
    cache = new_cache(ops, 4 * AHEAD)
    first_bytes = cache.memory()[::PAGE]
    written = slice(2 * AHEAD // PAGE, 3 * AHEAD // PAGE)
    first_bytes[written] = 201
    use(ops, cache, 2 * AHEAD // BLOCK_BYTES - 1)
    wait_until(lambda: resident(cache.memory()[: 3 * AHEAD]).all())

    assert (first_bytes[written] == 201).all()


def test_a_small_cache_is_left_to_those_who_use_it() -> None:
    cache = new_cache(cpu_ops(), 2 * HUGE_PAGE)
    time.sleep(0.1)

    assert not resident(cache.memory()).any()


def test_a_cache_goes_while_it_is_touched_and_in_a_forked_child() -> None:
    done = script(
        """
import os, sys, time
from pocketllm.engine.backends.cpu.ops import CpuOps
ops = CpuOps(2)
for number in range(20):
    cache = ops.new_kv_cache(4, 8, 64, 64, 1024, 16)
    time.sleep(number / 4000)
    del cache
cache = ops.new_kv_cache(4, 8, 64, 64, 1024, 16)
child = os.fork()
if child == 0:
    del cache
    os._exit(0)
_, status = os.waitpid(child, 0)
del cache
sys.exit(os.waitstatus_to_exitcode(status))
""",
        timeout=20,
    )

    assert (done.returncode, done.stderr) == (0, "")


# -- what steps compute in ---------------------------------------------------------------------------------------------
def test_the_buffers_of_a_captured_forward_are_there_before_its_first_step() -> None:
    ops = cpu_ops(2)
    table = ops.load_matrix(normal(40, 64).view(np.uint8).reshape(-1), "F32", (40, 64))

    def forward(batch: ForwardBatch) -> Any:
        x = ops.embed(table, batch.input_ids)
        return ops.add(ops.scale(x, 2.0), x)

    captured = ops.capture(forward, 100_000)
    whole = captured.result.reshape(-1).view(np.uint8)

    assert whole.nbytes == 100_000 * 64 * 4
    assert resident(whole).all()
