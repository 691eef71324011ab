"""Processes side by side, each with its output in a file of its own, all ended when time is up or on Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.evidence_steps import Step

PATIENCE_S, LOOK_S = 10.0, 0.1


@dataclass(frozen=True)
class Ended:
    """How a child ended; code: None where it was ended from here: no time was left, or Ctrl-C."""

    code: int | None
    seconds: float
    log: Path

    @property
    def is_well(self) -> bool:
        return self.code == 0

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


OnEnd = Callable[[Step, Ended], None]


def log_path(folder: Path, step: Step) -> Path:
    return folder / f"{step.name}.txt"


def together(steps: Sequence[Step], logs: Path, limit_s: float | None, on_end: OnEnd) -> Mapping[str, Ended]:
    """Start all, wait for all; `on_end` sees each as soon as it ended. No child outlives this call."""
    start, found = time.perf_counter(), {}
    running: dict[Step, subprocess.Popen[bytes]] = {}

    def tell(step: Step, code: int | None) -> None:
        del running[step]
        found[step.name] = Ended(code, time.perf_counter() - start, log_path(logs, step))
        on_end(step, found[step.name])

    def end_all() -> None:
        late = [step for step, child in running.items() if child.poll() is None]
        end([running[step] for step in late])
        for step in late:
            tell(step, None)

    try:
        for step in steps:
            running[step] = started(step, log_path(logs, step))
        while running:
            if limit_s is not None and time.perf_counter() - start >= limit_s:
                end_all()
            for step, child in list(running.items()):
                if child.poll() is not None:
                    tell(step, child.returncode)
            time.sleep(LOOK_S if running else 0)
    finally:
        end_all()
    return found


def started(step: Step, log: Path) -> "subprocess.Popen[bytes]":
    """In a group of its own, so that what it starts can be ended with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *step.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(children: Sequence["subprocess.Popen[bytes]"], patience_s: float = PATIENCE_S) -> None:
    """Ask as Ctrl-C does, which lets a benchmark close its record; who does not go within `patience_s` is killed."""
    for child in children:
        told(child, signal.SIGINT)
    until = time.perf_counter() + patience_s
    try:
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.perf_counter()))
    finally:  # a second Ctrl-C ends the patience
        for child in children:
            told(child, signal.SIGKILL)  # what it started too, which may be left when it is gone
            child.wait()


def told(child: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
