"""An empty cache costs nothing until it is used."""

import psutil

from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.select import select_backend


def test_a_new_cache_takes_no_memory_until_it_is_written() -> None:
    ops = select_backend("reference", BackendOptions(threads=1)).ops
    before_bytes = psutil.Process().memory_info().rss

    cache = ops.new_kv_cache(4, 4, 64, 64, num_blocks=2048, block_size=16)

    assert cache is not None
    assert psutil.Process().memory_info().rss - before_bytes < 32 << 20  # of 256 MiB
