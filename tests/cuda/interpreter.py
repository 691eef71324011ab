"""Starts checks of kernels in Triton's interpreter: in processes of their own, as it is chosen at Triton's import."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def in_interpreter(module: str, *parts: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m module parts…` on the CPU; what it printed and how it ended."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *parts]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
