"""Readings of the machine while a run lasts, under the names of the bench record's columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pocketllm.evidence.provenance import gpu
from pocketllm.evidence.provenance.machine import readable, throttle_count

CPU_THERMAL = 1 << 32
"""Bit of `throttle_mask` above NVML's: a core of the CPU has been throttled for heat since the last reading."""

CPUS = Path("/sys/devices/system/cpu")


class Meter:
    """Reads the machine between slots or requests, in well under a millisecond without a GPU; absent: not readable."""

    def __init__(self, throttled: Callable[[], int | None] = lambda: throttle_count(CPUS)) -> None:
        self._throttled = throttled
        self._count = self.throttle_count()

    def throttle_count(self) -> int | None:
        """Thermal events of all cores since boot; None where they are not told."""
        count = readable({"count": self._throttled}).get("count")
        return None if count is None else int(count)

    def read(self) -> dict[str, Any]:
        """Clocks, temperature, power, memory, and why anything was throttled since the last reading.

        Keys: gpu_clk_sm, gpu_clk_mem, cpu_freq (MHz), gpu_temp (degrees Celsius), gpu_power (watts), rss, vram (bytes),
        throttle_mask (NVML's bits, and CPU_THERMAL).
        """
        import psutil

        found = readable(
            {
                "cpu_freq": lambda: psutil.cpu_freq().current or None,
                "rss": lambda: psutil.Process().memory_info().rss,
            }
        )
        found |= gpu.reading()
        count, before = self.throttle_count(), self._count
        self._count = count
        if count is not None and before is not None:
            found["throttle_mask"] = found.get("throttle_mask", 0) | (CPU_THERMAL if count > before else 0)
        return found
