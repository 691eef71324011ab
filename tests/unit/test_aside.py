"""Jobs beside the event loop: their results, and the memory that they leave in the heaps of their threads."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from pocketllm.engine.serving.transport import aside
from pocketllm.engine.serving.transport.aside import Aside, give_back, of_glibc

NO_TRIM = pytest.mark.skipif(
    of_glibc("malloc_trim") is None, reason="no-malloc-trim: this C library gives nothing back"
)


def test_memory_is_given_back_once_for_jobs_that_end_together_also_where_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(aside, "TRIM_S", 0.0)
    monkeypatch.setattr(aside, "give_back", lambda: given.append(1))

    async def main() -> list[object]:
        jobs = Aside()
        found = await asyncio.gather(*(jobs.run(partial(divmod, 6, by)) for by in (3, 0, 2)), return_exceptions=True)
        while not given:
            await asyncio.sleep(0.001)
        num_given = len(given)
        await jobs.run(lambda: None)
        while len(given) == num_given:
            await asyncio.sleep(0.001)
        return found

    first, failed, last = asyncio.run(main())

    assert (first, last) == ((2, 0), (3, 0))
    assert isinstance(failed, ZeroDivisionError)
    assert len(given) <= 4


def test_nothing_is_given_back_once_the_threads_have_ended() -> None:
    told: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        await loop.shutdown_default_executor()
        loop.call_soon(Aside()._trim)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())

    assert told == []


@NO_TRIM
def test_what_a_job_freed_in_its_threads_heap_goes_back_to_the_system() -> None:
    def job() -> bytes:
        pieces = [bytes(1000) for _ in range(40_000)]
        return pieces[-1]  # the heap's end stays in use, and nothing below it can go by itself

    def rss_mib() -> float:
        return float(psutil.Process().memory_info().rss) / 2**20

    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(job).result()
        before_mib = rss_mib()
        give_back()

        assert before_mib - rss_mib() > 20
        assert not any(kept)


ONE_HEAP = """
import ctypes, psutil, threading
from pocketllm.engine.serving.transport.aside import give_back, share_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # glibc now keeps pieces of up to that size, and heaps of twice that

def job():
    pieces = [libc.malloc(1 << 20) for _ in range(40)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in pieces:
        libc.free(piece)

def rss_mib():
    return psutil.Process().memory_info().rss / 2**20

share_one_heap()
before = rss_mib()
thread = threading.Thread(target=job)
thread.start()
thread.join()
give_back()
print(rss_mib() - before)
"""


@NO_TRIM
def test_the_end_of_a_threads_heap_goes_back_too_where_all_share_one() -> None:
    run = subprocess.run([sys.executable, "-c", ONE_HEAP], capture_output=True, text=True, check=True)

    assert float(run.stdout) < 10  # of 40 MiB
