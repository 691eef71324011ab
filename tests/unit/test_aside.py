"""Jobs beside the event loop: their results, and the memory that they leave in the heaps of their threads."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from pocketllm.engine.serving.transport import aside
from pocketllm.engine.serving.transport.aside import Aside, give_back, malloc_trim


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


@pytest.mark.skipif(malloc_trim() is None, reason="no-malloc-trim: this C library gives nothing back")
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
