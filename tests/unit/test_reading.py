"""Reading a checkpoint to load it: nothing stays in memory that has been handed over, and one sees how far it is."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.reading import Reading
from tests.gguf_files import write_checkpoint

needs_madvise = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no-madvise: this system has none")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """16 tensors of 4 MiB each."""
    values = {f"t{number}": np.full((1024, 1024), number, np.float32) for number in range(16)}
    return write_checkpoint(tmp_path / "large.gguf", values, general__architecture="llama")


READ_ALL = """
import sys
from pathlib import Path
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.reading import Reading

def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssFile"].split()[0])

checkpoint = open_checkpoint(Path(sys.argv[1]))
checkpoint = Reading(checkpoint, lambda done, total: None) if sys.argv[2] == "reading" else checkpoint
before = resident()
total = sum(int(checkpoint.data(name).max()) for name in checkpoint.tensors)
print(resident() - before)
"""


@needs_madvise
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no-proc: resident pages cannot be read here")
def test_what_was_read_leaves_this_process_memory(large: Path) -> None:
    def grown_kib(how: str) -> int:
        command = [sys.executable, "-c", READ_ALL, str(large), how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert grown_kib("plain") > 60 * 1024  # the measure itself sees the file
    assert grown_kib("reading") < 12 * 1024


def test_a_tensor_that_was_let_go_reads_the_same_again(large: Path) -> None:
    with open_checkpoint(large) as checkpoint:
        held = checkpoint.data("t3")
        before = held.copy()
        checkpoint.forget("t3")

        np.testing.assert_array_equal(held, before)
        np.testing.assert_array_equal(checkpoint.values("t3"), np.full((1024, 1024), 3, np.float32))


def test_a_tensor_that_is_read_twice_in_a_row_counts_once(large: Path) -> None:
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: None)
        reading.values("t0")
        reading.data("t0")
        reading.data("t1")

        assert reading.done == 4 << 20


def test_progress_grows_to_nearly_all_and_never_past_it(large: Path) -> None:
    told: list[tuple[int, int]] = []
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: told.append((done, total)), interval_s=0.0)
        for name in checkpoint.tensors:
            reading.data(name)
        total = checkpoint.num_bytes

    assert [done for done, _ in told] == [number << 22 for number in range(16)]
    assert {all_bytes for _, all_bytes in told} == {total}


def test_progress_is_told_no_more_often_than_asked(large: Path) -> None:
    told: list[int] = []
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: told.append(done), interval_s=3600.0)
        for name in checkpoint.tensors:
            reading.data(name)

    assert told == []
