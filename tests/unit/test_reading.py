"""Reading a checkpoint to load it: nothing stays in memory that has been handed over, and one sees how far it is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.reading import Reading
from pocketllm.errors import CheckpointError
from tests.gguf_files import ARRAY, STRING, array, gguf_bytes, key, text, write_checkpoint


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """16 tensors of 4 MiB each."""
    values = {f"t{number}": np.full((1024, 1024), number, np.float32) for number in range(16)}
    return write_checkpoint(tmp_path / "large.gguf", values, general__architecture="llama")


READ_ALL = """
import sys
from pathlib import Path
from typing import Any
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.reading import Reading

def most_resident():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0])

reading = Reading(open_checkpoint(Path(sys.argv[1])), lambda done, total: None)
before = most_resident()
held = [reading.data(name) if sys.argv[2] == "held" else int(reading.data(name).max()) for name in reading.tensors]
print(most_resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no-proc: resident pages cannot be read here")
def test_no_more_of_the_file_is_in_memory_than_is_held(large: Path) -> None:
    def grown_kib(how: str) -> int:
        command = [sys.executable, "-c", READ_ALL, str(large), how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert grown_kib("held") > 60 * 1024  # the measure itself sees the file
    assert grown_kib("let go") < 12 * 1024


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


# -- a file that somebody else writes to -------------------------------------------------------------------------------


def test_a_file_that_is_cut_short_while_it_is_read_is_refused_in_a_sentence(large: Path) -> None:
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: None)
        reading.data("t0")
        os.truncate(large, 1 << 20)

        with pytest.raises(
            CheckpointError, match=r"large.gguf was changed .*'t9' needs bytes .* now the file has 1048576"
        ):
            reading.data("t9")


def test_a_file_that_is_cut_while_its_header_is_read_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "long.gguf", os.preadv
    path.write_bytes(gguf_bytes([key("words", ARRAY, array(STRING, 150_000, text("sixteen letters.") * 150_000))]))

    def read_and_cut(*given: Any) -> int:
        count = real(*given)
        os.truncate(path, 1 << 20)
        return count

    monkeypatch.setattr(os, "preadv", read_and_cut)

    with pytest.raises(CheckpointError, match=r"long.gguf was changed .*'header' needs .* now the file has 1048576"):
        open_checkpoint(path)


def test_what_the_header_says_is_known_after_the_file_was_cut_to_nothing(large: Path) -> None:
    with open_checkpoint(large) as checkpoint:
        os.truncate(large, 0)

        assert checkpoint.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("change", ["written", "longer"])
def test_a_file_that_was_written_to_while_it_was_read_is_refused_in_the_end(large: Path, change: str) -> None:
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: None)
        for name in checkpoint.tensors:
            reading.data(name)
        with large.open("r+b") as file:
            file.seek(-4 if change == "written" else 0, os.SEEK_END)
            file.write(b"else")

        with pytest.raises(CheckpointError, match=r"large.gguf was changed while it was being loaded"):
            reading.finish()


def test_a_file_that_nobody_wrote_to_is_taken(large: Path) -> None:
    with open_checkpoint(large) as checkpoint:
        reading = Reading(checkpoint, lambda done, total: None)
        reading.data("t0")
        reading.finish()
