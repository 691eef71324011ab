"""The native library built otherwise: with sanitizers, and for another processor. Minutes each: `make test-full`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.parity.aarch64_logits import logits
from tests.parity.drive import Float32Array, nmse

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "pocketllm" / "engine" / "backends" / "cpu" / "native"
ORACLES = ROOT / "tests" / "oracles"
AARCH64 = ROOT / "build" / "aarch64"


def build(folder: Path, *settings: str) -> Path:
    """The library, configured so; warnings are errors here."""
    configure = ["cmake", "-S", str(NATIVE), "-B", str(folder), "-DCMAKE_CXX_FLAGS=-Werror", *settings]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count())]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "libpocketllm_cpu.so"


# -- sanitizers ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose processes load the library built with the address and undefined-behavior sanitizers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform != "linux":
        pytest.skip("no-sanitizer: needs a C++ compiler on Linux")
    library = build(tmp_path_factory.mktemp("sanitized"), "-DPOCKETLLM_SANITIZE=address,undefined")
    # Python itself is no C++ program: without the C++ library the sanitizer could not find what throws
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    runtimes = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself never frees all
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "POCKETLLM_CPU_LIBRARY": str(library),
    }


def test_operations_and_families_run_clean_under_the_sanitizers(sanitized: dict[str, str]) -> None:
    suites = sorted(path for path in ROOT.glob("tests/*/test_cpu_*.py") if path.name != Path(__file__).name)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--capture=sys"]  # a report goes past Python, to the file itself
    command = [sys.executable, "-m", "pytest", *options, *map(str, suites)]
    done = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " passed" in done.stdout
    assert "runtime error" not in done.stdout + done.stderr


def test_the_sanitizer_itself_sees_a_row_that_is_written_past_its_end(sanitized: dict[str, str]) -> None:
    program = (
        "import ctypes, numpy as np\n"
        "from pocketllm.engine.backends.cpu.library import library_path\n"
        "whole = ctypes.CDLL(str(library_path()))\n"
        "x, out = np.ones((1, 64), np.float32), np.empty(8, np.uint8)\n"
        "pointer = lambda array: ctypes.c_void_p(array.ctypes.data)\n"
        "whole.pocketllm_quantize(b'portable', 0, pointer(x), 1, 64, None, ctypes.c_float(0), pointer(out))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


# -- another processor -------------------------------------------------------------------------------------------------
CHECKPOINTS = [ORACLES / f"{name}.gguf" for name in ("llama", "gemma3_text", "q_Q4_1", "q_Q4_K", "q_Q6_K", "q_Q8_0")]
TOLERANCES = {"float32": 1e-9, "int16": 1e-8, "int8": 3e-3}
"""Squared error over the squared size of the logits; a value next to a tie is rounded to int8 the other way."""


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs `python WORDS` on an emulated aarch64 processor with the library built for it; what it printed."""
    if not (AARCH64 / "done").exists() or shutil.which("qemu-aarch64") is None:
        pytest.skip("no-aarch64: run .ci/aarch64 first")
    python = AARCH64 / "usr" / "bin" / (AARCH64 / "done").read_text().strip()
    cross = ["SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64", "CXX_COMPILER=aarch64-linux-gnu-g++"]
    library = build(tmp_path_factory.mktemp("aarch64"), *(f"-DCMAKE_{setting}" for setting in cross))
    settings = {"PYTHONPATH": f"{AARCH64 / 'site'}:{ROOT}", "POCKETLLM_CPU_LIBRARY": str(library)}

    def run(*words: str) -> str:
        command = ["qemu-aarch64", "-L", str(AARCH64), str(python), *words]
        environment = {**os.environ, **settings, "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def emulated(emulate: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Float32Array]:
    """Logits of the tiny checkpoints as an aarch64 processor computes them; by checkpoint, instruction set, dtype."""
    out = tmp_path_factory.mktemp("logits") / "out.npz"
    emulate("-m", "tests.parity.aarch64_logits", str(out), *map(str, CHECKPOINTS))
    return dict(np.load(out))


def test_an_aarch64_processor_passes_the_tests_of_packed_matrices(emulate: Callable[..., str]) -> None:
    said = emulate("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "tests/unit/test_cpu_matmul.py")

    assert " passed" in said


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_an_aarch64_processor_gives_the_logits_of_this_one(
    path: Path, dtype: str, emulated: dict[str, Float32Array]
) -> None:
    expected = logits(path, "portable", dtype)
    found = {name.split()[1]: value for name, value in emulated.items() if name.split()[::2] == [path.stem, dtype]}

    assert set(found) == {"neon", "portable"}
    for isa, got in found.items():
        assert nmse(got, expected) <= TOLERANCES[dtype], isa
