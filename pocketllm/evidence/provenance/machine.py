"""On what machine a record was made: hard facts that key a history, volatile ones that explain a day."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ISA_FLAGS = {
    *("sse4_2", "avx", "avx2", "f16c", "fma", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
}
"""Instruction set flags that kernels choose by."""


def hard_facts() -> dict[str, Any]:
    """What only a screwdriver (or another allotment of cores) changes; a history holds runs whose facts are equal."""
    import psutil

    return readable(
        {
            "architecture": lambda: platform.machine() or None,
            "cpu": cpu_name,
            "cores_physical": lambda: psutil.cpu_count(logical=False),
            "cores_logical": lambda: psutil.cpu_count(logical=True),
            "cores_usable": lambda: len(os.sched_getaffinity(0)),
            "cpu_quota_cores": cpu_quota_cores,
            "memory_gib": lambda: round(psutil.virtual_memory().total / 2**30),
            "isa": isa_flags,
            "gpus": gpu_names,
        }
    )


def volatile_facts() -> dict[str, Any]:
    """What may differ between two runs on the same hardware."""
    import psutil

    cpu = Path("/sys/devices/system/cpu")
    return readable(
        {
            "os": lambda: platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system(),
            "kernel": lambda: platform.release() or None,
            "governor": lambda: read_line(cpu / "cpu0/cpufreq/scaling_governor"),
            "turbo_off": lambda: read_line(cpu / "intel_pstate/no_turbo") == "1",
            "cpu_freq_mhz": lambda: round(psutil.cpu_freq().current) or None,
            "load_1m": lambda: round(os.getloadavg()[0], 2),
            "memory_available_gib": lambda: round(psutil.virtual_memory().available / 2**30, 1),
            "on_mains": lambda: psutil.sensors_battery().power_plugged,
            "throttle_count": lambda: throttle_count(cpu),
            "gpu_driver": lambda: read_line(Path("/sys/module/nvidia/version")),
        }
    )


def readable(facts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The facts that could be read; a reader that fails or finds None leaves its fact out."""
    found: dict[str, Any] = {}
    for name, read in facts.items():
        try:
            value = read()
        except (OSError, AttributeError, ValueError, NotImplementedError, RuntimeError):
            continue
        if value is not None:
            found[name] = value
    return found


def read_line(path: Path) -> str:
    """The first line of a system file; OSError when there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or not lines[0].strip():
        raise OSError(f"{path} is empty")
    return lines[0].strip()


def cpu_name() -> str | None:
    """The processor's own name, spaces folded."""
    if sys.platform == "darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
        except subprocess.SubprocessError:
            return None
    return next((" ".join(value.split()) for value in cpuinfo("model name")), None)


def cpuinfo(key: str) -> Iterator[str]:
    """Values of one key in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip():
            yield value.strip()


def isa_flags() -> list[str] | None:
    """Those of the processor's flags that kernels choose by, sorted."""
    flags = next(cpuinfo("flags"), None) or next(cpuinfo("Features"), None)
    return None if flags is None else sorted(ISA_FLAGS & set(flags.split()))


def cpu_quota_cores() -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    quota, period = read_line(Path("/sys/fs/cgroup/cpu.max")).split()
    return None if quota == "max" else round(int(quota) / int(period), 2)


def gpu_names() -> list[str] | None:
    """NVIDIA GPU names as the kernel driver tells them; no vendor library is loaded."""
    texts = [
        file.read_text(encoding="utf-8") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    return [name.strip() for key, _, name in lines if key == "Model"] or None


def throttle_count(cpu: Path) -> int | None:
    """Thermal throttle events of all cores since boot."""
    files = list(cpu.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return sum(int(read_line(file)) for file in files) if files else None
