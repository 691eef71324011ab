"""An empty cache costs nothing until it is used."""

import subprocess
import sys

GROWN = """
import psutil
from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.select import select_backend

ops = select_backend("reference", BackendOptions(threads=1)).ops
before_bytes = psutil.Process().memory_info().rss
cache = ops.new_kv_cache(4, 4, 64, 64, num_blocks=2048, block_size=16)
print(psutil.Process().memory_info().rss - before_bytes)
"""


def test_a_new_cache_takes_no_memory_until_it_is_written() -> None:
    # in a process of its own: in one that has freed much, zeros are written into what it has left
    grown_bytes = int(subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True).stdout)

    assert grown_bytes < 32 << 20  # of 256 MiB
