"""The CPU backend for tests, where its native library was built."""

from functools import cache
from typing import Any

import pytest

from pocketllm.errors import UnsupportedFeatureError


@cache
def why_not() -> str:
    """Why the library cannot be used; empty when it can."""
    from pocketllm.engine.backends.cpu.library import open_library

    try:
        open_library()
    except UnsupportedFeatureError as error:
        return str(error)
    return ""


def usable_isas() -> tuple[str, ...]:
    """Instruction sets to test, best first; `none` where there is no library, which `cpu_ops` skips."""
    from pocketllm.engine.backends.cpu.library import usable_isas as usable

    return ("none",) if why_not() else usable()


def cpu_ops(threads: int = 1, **settings: Any) -> Any:
    """CpuOps with these settings; skips with a machine-readable reason where the library was not built."""
    if why_not():
        pytest.skip(f"native-library-missing: {why_not()}")
    from pocketllm.engine.backends.cpu.ops import CpuOps

    return CpuOps(threads, **settings)
