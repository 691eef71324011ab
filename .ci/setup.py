"""Make the virtual environment that `make demo` and `make test` use; the standard library is enough to run this.

Says what it does, how much it downloads before it starts, and nothing at all when there is nothing to do.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "pocketllm" / "engine" / "backends" / "cpu"
MINIMUM_TORCH = (2, 9)
PROGRESS_S = 20
HAS_TORCH = f"""
import importlib.metadata as m, re, sys
try:
    version = m.version("torch")
except m.PackageNotFoundError:
    sys.exit(1)
print(version)
sys.exit(tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < {MINIMUM_TORCH})
"""


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def stop(message: str) -> None:
    sys.exit(f"setup: {message}")


def installed_torch(python: Path | str) -> str | None:
    """Version of a torch that is new enough to keep, as that interpreter sees it."""
    answer = subprocess.run([python, "-c", HAS_TORCH], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def make_venv(venv: Path) -> None:
    if (venv / "bin" / "python").exists():
        return
    command = [sys.executable, "-m", "venv", str(venv)]
    torch = installed_torch(sys.executable)
    if torch:
        say(f"{sys.executable} has torch {torch}: the environment will see it instead of downloading another")
        command.append("--system-site-packages")
    say(f"making {venv.name} with Python {sys.version.split()[0]}")
    if subprocess.run(command, check=False).returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        stop("could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv")


def size_of(url: str) -> int | None:
    """Bytes behind an address that pip resolved, without fetching them."""
    if url.startswith("file:"):
        return 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def without_native() -> dict[str, str]:
    """The environment for a pip that shall not compile: its metadata alone would cost the whole build, unannounced."""
    return {**os.environ, "POCKETLLM_NATIVE": "off"}


def is_cuda_library(name: str) -> bool:
    """Whether a package is one of CUDA's own, which torch brings along; nvidia-ml-py, which all get, is not."""
    return name.startswith(("nvidia-cu", "cuda-"))


def announce(python: Path, arguments: list[str]) -> None:
    """Say what pip would download, and how much, before it starts."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--report", "-"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*pip, *arguments], stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=without_native())
    report, errors = finish(process, "asking which packages are needed")
    if process.returncode != 0:
        stop(f"pip cannot resolve the dependencies:\n{errors.strip()}")
    items = json.loads(report)["install"]
    wanted = [(item["metadata"]["name"], item["download_info"]["url"]) for item in items]
    sizes = [size_of(url) for _, url in wanted]
    unknown = sum(size is None for size in sizes)
    total = sum(size or 0 for size in sizes) / 1e6
    say(
        f"{len(wanted)} packages to install, about {total:,.0f} MB"
        + (f" and {unknown} of unknown size" * bool(unknown))
    )
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    if any(is_cuda_library(name) for name, _ in wanted) and not has_gpu:
        say("this torch carries CUDA libraries and no NVIDIA GPU is seen here; to take the small CPU build instead,")
        say("stop now and run: make demo TORCH_INDEX=<address of PyTorch's CPU package index>")


def install(python: Path, extra: str, torch_index: str) -> None:
    """The packages; the native library is built afterwards, so that it is said when."""
    project = f"-e{ROOT}[{extra}]" if extra else f"-e{ROOT}"
    constraints = [] if installed_torch(python) else ["-c", str(ROOT / "constraints.txt")]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if constraints and torch_index:
        say("installing torch from TORCH_INDEX")
        run([*pip, "--index-url", torch_index, *constraints, "torch"])
    announce(python, [*constraints, project])
    run([*pip, *constraints, project], env=without_native())


def build_native(python: Path) -> None:
    """Compile what is new of the native library; every package it needs is there."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    say("building the native CPU library (minutes on two cores, less on more)")
    run([*pip, f"-e{ROOT}"], "building the native CPU library")


def report_native() -> None:
    """What came of the native library, as the build hook noted it."""
    note = (BACKEND / "native_build.txt").read_text(encoding="utf-8").strip()
    say(f"native CPU library: {note}")
    if note.startswith("not built"):
        say("the slow reference backend runs in its place; once a C++17 compiler is there, run the same command again")


def run(command: list[str | Path], doing: str = "pip is at work", env: dict[str, str] | None = None) -> None:
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True)
    finish(process, doing)
    if process.returncode != 0:
        stop("pip failed; what it printed is above. Run the same command again to go on from there")


def finish(process: "subprocess.Popen[str]", doing: str) -> tuple[str, str]:
    """Wait for a process, with a line now and then of what takes so long; what it printed into pipes."""
    started_s = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=PROGRESS_S)
        except subprocess.TimeoutExpired:
            say(f"{doing}, {time.monotonic() - started_s:.0f} s so far")


class Stamp:
    """A file that says what was set up last, so that nothing is done twice."""

    def __init__(self, path: Path, *parts: bytes) -> None:
        self.path = path
        self.wanted = hashlib.sha256(b"\0".join(parts)).hexdigest()

    def holds(self) -> bool:
        return self.path.is_file() and self.path.read_text() == self.wanted

    def write(self) -> None:
        self.path.write_text(self.wanted)


def packages_stamp(venv: Path, extra: str) -> Stamp:
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return Stamp(venv / f"setup-{extra or 'run'}.done", *parts, extra.encode())


def processor_flags() -> bytes:
    """The instruction sets that the library is built for follow from it: it may stand on a disk that moves on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith(b"flags")), b"")


def native_stamp(venv: Path) -> Stamp:
    """Sources, what they are built for, and how; where there is no library also the compiler, which may come later."""
    sources = [path for path in sorted((BACKEND / "native").rglob("*")) if path.is_file()]
    parts = [path.read_bytes() for path in (ROOT / "hatch_build.py", *sources)]
    parts.append(processor_flags())
    if not (BACKEND / "libpocketllm_cpu.so").exists():
        compilers = [shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++")]
        parts += [repr((compilers, os.environ.get("POCKETLLM_NATIVE"))).encode()]
    return Stamp(venv / "setup-native.done", *parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extra", default="", help="an extra of the project, such as test")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file alone must run on an older Python, to say so
        stop(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; name another with PYTHON=python3.12")
    venv = arguments.venv.resolve()
    # an environment made with an extra has everything that one without it has
    has_packages = any(packages_stamp(venv, extra).holds() for extra in {arguments.extra, "test"})
    if has_packages and native_stamp(venv).holds():
        return
    if not has_packages:
        make_venv(venv)
        install(venv / "bin" / "python", arguments.extra, os.environ.get("TORCH_INDEX", ""))
        packages_stamp(venv, arguments.extra).write()
    build_native(venv / "bin" / "python")
    report_native()
    native_stamp(venv).write()
    say("ready")


if __name__ == "__main__":
    main()
