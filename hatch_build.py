"""Build hook: compile the native CPU library beside the Python that loads it; where that fails, say why and go on.

`POCKETLLM_NATIVE=require` makes a failed build an error, `off` leaves the library out; the default is `auto`. What came
of it stands in native_build.txt beside the library, where `pocketllm check` reads it.
"""

import os
import platform
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODES = ("auto", "require", "off")
BACKEND = Path("pocketllm", "engine", "backends", "cpu")
LIBRARY = "libpocketllm_cpu.so"
NOTE = "native_build.txt"
LOG = "build.log"
AVX2 = frozenset({"avx2", "fma", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
ISAS = {"avx2": AVX2, "avxvnni": AVX2 | {"avx_vnni"}, "avx512": AVX512, "avx512vnni": AVX512 | {"avx512_vnni"}}
"""What each instruction set asks of a processor, as /proc/cpuinfo calls it; native/dispatch.cpp asks the same."""


class CannotBuild(Exception):  # noqa: N818  # not an error unless it was required
    """Why there is no library, in words that follow `the native library was not built: `."""


class NativeBuild(BuildHookInterface[Any]):
    """Runs CMake for wheels and editable installs alike."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake and Ninja where the system has none; nothing where there is no compiler for them."""
        if mode() == "off" or compiler() is None:
            return []
        return [name for name in ("cmake>=3.20", "ninja") if shutil.which(name.partition(">")[0]) is None]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, note what came of it, and tell hatchling what kind of wheel this is."""
        wanted, folder = mode(), Path(self.root, BACKEND)
        try:
            if wanted == "off":
                raise CannotBuild("POCKETLLM_NATIVE=off left it out")
            # what is installed from this checkout runs here; a wheel may be carried elsewhere
            isas = isas_of(read_flags()) if version == "editable" else ()
            took_s = build(Path(self.root), folder, isas)
        except CannotBuild as problem:
            (folder / LIBRARY).unlink(missing_ok=True)
            (folder / NOTE).write_text(f"not built: {problem}\n", encoding="utf-8")
            if wanted == "require":
                raise SystemExit(f"the native CPU library was not built: {problem}") from None
            self.app.display_warning(f"the native CPU library was not built: {problem}")
            return
        if took_s is not None:  # pip asks twice, for the metadata and for the wheel
            (folder / NOTE).write_text(f"built in {took_s:.0f} s\n", encoding="utf-8")
        if version == "standard":
            # a plain C interface: one wheel for every Python of a platform
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")


def mode() -> str:
    """What POCKETLLM_NATIVE asks for."""
    wanted = os.environ.get("POCKETLLM_NATIVE") or "auto"
    if wanted not in MODES:
        raise SystemExit(f"POCKETLLM_NATIVE={wanted!r} is none of {', '.join(MODES)}")
    return wanted


def compiler() -> str | None:
    """The C++ compiler that CMake will take, or None."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)


def read_flags() -> frozenset[str]:
    """What the processor can do, from /proc/cpuinfo; nothing where that is not to be read, or names it otherwise."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def isas_of(flags: frozenset[str]) -> tuple[str, ...]:
    """Instruction sets that a processor with these flags can run; none where there are no flags, which means all.

    >>> isas_of(frozenset({"avx2", "fma", "bmi2", "avx_vnni"}))
    ('portable', 'avx2', 'avxvnni')
    """
    return ("portable", *(isa for isa, needed in ISAS.items() if needed <= flags)) if flags else ()


def build(root: Path, folder: Path, isas: tuple[str, ...]) -> float | None:
    """Configure, compile and put the library into its folder: seconds, or None when it was there and nothing was new.

    isas: instruction sets to compile for; none: all. Raises CannotBuild with the reason.
    """
    if compiler() is None:
        raise CannotBuild("no C++ compiler was found (c++, g++ or clang++, or CXX)")
    if shutil.which("cmake") is None:
        raise CannotBuild("no CMake was found")
    at = root / "build" / "native"
    configure = ["cmake", "-S", str(folder / "native"), "-B", str(at), "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    # said outright, or CMake would keep the compiler and the instruction sets of an earlier build
    configure += [f"-DCMAKE_CXX_COMPILER={compiler()}", f"-DPOCKETLLM_ISAS={';'.join(isas)}"]
    at.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    try:
        run(configure, at)
    except CannotBuild:
        # what an earlier build left may name a CMake or a compiler that is gone
        shutil.rmtree(at)
        at.mkdir()
        run(configure, at)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    run(["cmake", "--build", str(at), "--parallel", str(cores)], at)
    if stamp(at / LIBRARY) == stamp(folder / LIBRARY):
        return None
    # moved into place: a process that runs the old library keeps it
    shutil.copy2(at / LIBRARY, folder / f"{LIBRARY}.new")
    os.replace(folder / f"{LIBRARY}.new", folder / LIBRARY)
    return time.monotonic() - started_s


def stamp(path: Path) -> int | None:
    """When a file was written; None where there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def run(command: list[str], at: Path) -> None:
    """Run one step with its output in the log. Raises CannotBuild with the line that says what went wrong."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    with (at / LOG).open("a", encoding="utf-8") as log:
        log.write(done.stdout)
    if done.returncode != 0:
        raise CannotBuild(f"{first_error(done.stdout)}; see build/native/{LOG}")


def first_error(output: str) -> str:
    """The sentence of CMake's or the compiler's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    at = next((number for number, line in enumerate(lines) if "error" in line.lower()), None)
    if at is None:
        return "the build failed without a word"
    # CMake says only where it was in that line, and the reason below
    said = " ".join(lines[at + 1 : at + 4]) if lines[at].startswith("CMake Error") else lines[at]
    return said[:200].rstrip(".")
