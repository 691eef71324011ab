"""Where the time of a run goes, by kind of work: printed at the end when `POCKETLLM_CPU_PROFILE` is 1."""

import atexit
import ctypes
import os
import sys

from pocketllm.engine.backends.cpu.library import Engine

VARIABLE = "POCKETLLM_CPU_PROFILE"


def start_if_asked(engine: Engine) -> None:
    """Let this engine's programs take the time of their phases; costs them about 50 ns each."""
    if os.environ.get(VARIABLE) == "1":
        engine.library.profile_start(engine.address)
        atexit.register(lambda: print(report(engine), file=sys.stderr))


def figures(engine: Engine) -> dict[str, tuple[float, float, float, float]]:
    """By kind of phase that ran: calls, seconds, bytes of weights or cache that were read, operations."""
    found = {}
    values = (ctypes.c_double * 4)()
    kind = 0
    while (name := engine.library.profile_read(engine.address, kind, values)) is not None:
        if values[0]:
            found[name.decode()] = (values[0], values[1], values[2], values[3])
        kind += 1
    return found


def report(engine: Engine) -> str:
    """A table, the most expensive kind first."""
    rows = sorted(figures(engine).items(), key=lambda row: -row[1][1])
    total = sum(seconds for _, (_, seconds, _, _) in rows) or 1.0
    lines = [f"{'phase':<12} {'calls':>9} {'seconds':>9} {'share':>6} {'us each':>9} {'GB/s':>7} {'GOP/s':>8}"]
    lines += [
        f"{name:<12} {calls:>9.0f} {seconds:>9.3f} {seconds / total:>6.1%} {seconds / calls * 1e6:>9.2f}"
        f" {read / seconds / 1e9:>7.1f} {operations / seconds / 1e9:>8.1f}"
        for name, (calls, seconds, read, operations) in rows
    ]
    return "\n".join(lines)
