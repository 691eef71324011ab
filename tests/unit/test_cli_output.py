"""What every command does when its output has nowhere to go."""

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="a Linux device that is always full")
def test_a_full_disk_is_one_sentence_and_exit_code_2() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pocketllm", "models", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the output: No space left on device")
    assert "Traceback" not in done.stderr
