"""Facts of the machine this process runs on, as a process may use it; read without torch."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""A cgroup v1 without a limit reports a number near 2^63."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a backend needs to know before it bids."""

    cpu_name: str
    architecture: str
    """Instruction set as the operating system names it: x86_64, aarch64, arm64 …"""
    num_cores: int
    """Cores this process may use: affinity and cgroup quota considered."""
    memory_bytes: int
    """Memory of the machine, or of the cgroup where that is less."""
    available_bytes: int
    """Memory that can be had now without swapping, within the cgroup."""
    isa_flags: frozenset[str]
    """CPU feature flags as the kernel names them; empty where it does not tell."""
    gpus: tuple[str, ...]
    """Names of NVIDIA devices that the driver lists, whether or not any backend can use them."""


def read_facts() -> DeviceFacts:
    """Look at this machine once."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = memory_cgroup()
    info = read_cpuinfo()
    return DeviceFacts(
        cpu_name=info.get("model name") or mac_cpu_name() or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        num_cores=num_usable_cores(),
        memory_bytes=min(memory.total, limit),
        available_bytes=max(0, min(memory.available, limit - used)),
        isa_flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
        gpus=nvidia_gpus(),
    )


def num_usable_cores() -> int:
    """Cores by affinity, less where a cgroup grants fewer whole ones; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(cpu_quota())))


def cpu_quota() -> float:
    """Cores that the tightest cgroup of this process grants (cgroup v2, then v1); infinity as a large number."""
    quota = float(1 << 30)
    for folder in own_cgroups():
        words = read_words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quota = min(quota, int(words[0]) / int(words[1]))
    given, period = (read_words(CGROUPS / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if given and period and int(given[0]) > 0:
        quota = min(quota, int(given[0]) / int(period[0]))
    return quota


def memory_cgroup() -> tuple[int, int]:
    """Limit and present use in bytes of the tightest memory cgroup; (UNLIMITED_BYTES, 0) without one.

    Pages of files that the kernel can drop do not count as used.
    """
    limit, used = UNLIMITED_BYTES, 0
    places = [(folder, "memory.max", "memory.current", "inactive_file") for folder in own_cgroups()]
    places.append((CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    for folder, limit_file, use_file, droppable in places:
        words = read_words(folder / limit_file)
        if not words or words[0] == "max" or int(words[0]) >= limit:
            continue
        statistics = read_words(folder / "memory.stat")
        pairs = dict(zip(statistics[::2], statistics[1::2], strict=False))
        use = read_words(folder / use_file) or ["0"]
        limit, used = int(words[0]), max(0, int(use[0]) - int(pairs.get(droppable, 0)))
    return limit, used


def own_cgroups() -> list[Path]:
    """Folders of this process's cgroup v2 and its ancestors, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split("::", 1)[1].lstrip("/") for line in lines if line.startswith("0::")]
    folders: list[Path] = []
    for path in paths:
        folder = CGROUPS / path
        while folder != CGROUPS.parent:
            folders.append(folder)
            folder = folder.parent
    return folders


def read_words(path: Path) -> list[str]:
    """Words of a small file; none when it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def read_cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def mac_cpu_name() -> str:
    """The processor's brand on macOS; empty elsewhere."""
    if sys.platform != "darwin":
        return ""
    import subprocess

    answer = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def nvidia_gpus() -> tuple[str, ...]:
    """Names that the NVIDIA kernel driver lists; empty without one."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(errors="replace").splitlines()
        names += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return tuple(names)
