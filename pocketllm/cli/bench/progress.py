"""What a run tells while it lasts, on stderr: a bar where somebody watches, plain lines where not."""

import sys
import time
from typing import TYPE_CHECKING, Any

from pocketllm.cli.output import say

if TYPE_CHECKING:
    from pocketllm.bench.run import Done, Progress


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

    def slot_done(self, done: "Done") -> None:
        now = time.monotonic()
        if now - self.last_s >= self.every_s or done.slots == done.total:
            self.last_s = now
            say(f"slot {done.slots} of {done.total}, block {done.block}, {done.arm}; {left(done)}")


class Bar:
    """Progress as a bar on a terminal's stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        arm = TextColumn("{task.fields[arm]}")
        # in a narrow terminal the words go on in a second line, and the count beside them stays whole
        left = TextColumn("{task.fields[left]}", table_column=Column(no_wrap=False))
        columns = (arm, BarColumn(bar_width=20), MofNCompleteColumn(), left)
        self.rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self.task: Any = None

    def __enter__(self) -> "Progress":
        self.rich.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.rich.stop()

    def say(self, text: str) -> None:
        self.rich.console.print(text, markup=False, highlight=False)

    def slot_done(self, done: "Done") -> None:
        if self.task is None:
            self.task = self.rich.add_task("slots", total=done.total, arm=done.arm, left=left(done))
        self.rich.update(self.task, completed=done.slots, arm=done.arm, left=left(done))


def left(done: "Done") -> str:
    """What remains, and where the intervals of the time ratios stand."""
    running = f"; time ratio so far: {done.interval}" if done.interval else ""
    return f"{done.left_s:.0f} s left{running}"


def bar_or_lines() -> "Lines | Bar":
    """A bar where somebody watches, lines where not."""
    return Bar() if sys.stderr.isatty() else Lines()
