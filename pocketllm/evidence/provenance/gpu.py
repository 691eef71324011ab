"""NVIDIA GPU facts through nvidia-ml-py; every one of them absent where the library or the driver does not tell it."""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pocketllm.evidence.provenance.machine import readable


@cache
def library() -> Any:
    """The loaded and initialized library, or None: not installed, no driver, or no right to ask it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@cache
def handle() -> Any:
    """The GPU that this process would use: the first of CUDA_VISIBLE_DEVICES, else the first; None without one."""
    nvml = library()
    if nvml is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    try:
        if first.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(first))
        return nvml.nvmlDeviceGetHandleByUUID(first) if first else None
    except nvml.NVMLError:
        return None


def read(facts: Mapping[str, Callable[[Any, Any], Any]]) -> dict[str, Any]:
    """Facts of the GPU, each read by a function of (library, handle); what the driver refuses is absent."""
    nvml, device = library(), handle()
    if nvml is None or device is None:
        return {}

    def bound(fact: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        def call() -> Any:
            try:
                return fact(nvml, device)
            except nvml.NVMLError as error:
                raise OSError(str(error)) from error

        return call

    return readable({name: bound(fact) for name, fact in facts.items()})


def hard_facts() -> dict[str, Any]:
    """Memory of the GPU; names and number come from the kernel driver, without a library."""
    return read({"gpu_memory_gib": lambda nvml, gpu: round(nvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**30)})


def volatile_facts() -> dict[str, Any]:
    """Driver, limits and modes that may differ between two runs on the same hardware."""
    return read(
        {
            "gpu_driver": lambda nvml, gpu: nvml.nvmlSystemGetDriverVersion(),
            "gpu_cuda": lambda nvml, gpu: cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
            "gpu_power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3,
            "gpu_clk_sm_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_clk_mem_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "gpu_persistence": lambda nvml, gpu: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
            "gpu_ecc": lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
            "gpu_mig": lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
        }
    )


def cuda_version(number: int) -> str:
    """The driver's CUDA version.

    >>> cuda_version(13010)
    '13.1'
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def reading() -> dict[str, Any]:
    """What changes while a run lasts, under the names of the record's columns; `throttle_mask` has NVML's bits."""
    return read(
        {
            "gpu_clk_sm": lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "gpu_clk_mem": lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            "gpu_temp": lambda nvml, gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "gpu_power": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "throttle_mask": lambda nvml, gpu: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
            "vram": lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        }
    )
