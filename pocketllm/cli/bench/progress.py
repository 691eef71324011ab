"""What a run tells while it lasts, on stderr: a bar where somebody watches, plain lines where not."""

import sys
import time
from typing import TYPE_CHECKING, Any

from pocketllm.cli.output import say

if TYPE_CHECKING:
    from pocketllm.bench.run import Progress


class Lines:
    """Progress as plain lines on stderr, at most one every few seconds."""

    every_s = 10.0

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)

    def slot_done(self, done: int, total: int, left_s: float) -> None:
        now = time.monotonic()
        if now - self.last_s >= self.every_s or done == total:
            self.last_s = now
            say(f"slot {done} of {total}, {left_s:.0f} s left")


class Bar:
    """Progress as a bar on a terminal's stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("slots"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self.rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self.task: Any = None

    def __enter__(self) -> "Progress":
        self.rich.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.rich.stop()

    def say(self, text: str) -> None:
        self.rich.console.print(text, markup=False, highlight=False)

    def slot_done(self, done: int, total: int, left_s: float) -> None:
        left = f"{left_s:.0f} s left"
        if self.task is None:
            self.task = self.rich.add_task("slots", total=total, left=left)
        self.rich.update(self.task, completed=done, left=left)


def bar_or_lines() -> "Lines | Bar":
    """A bar where somebody watches, lines where not."""
    return Bar() if sys.stderr.isatty() else Lines()
