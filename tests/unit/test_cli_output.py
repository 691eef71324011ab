"""What every command does when its output has nowhere to go."""

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="dev-full-missing")
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


@pytest.mark.model
def test_a_warning_is_one_line_of_advice_without_a_place_in_our_code(smollm2: Path) -> None:
    words = ["generate", "a\x04b", "--model", str(smollm2), "--max-tokens", "1"]

    done = subprocess.run(
        [sys.executable, "-m", "pocketllm", *words], capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "0x04" in line]
    assert line == "warning: the vocabulary has no token for byte 0x04: it is missing from the prompt"
