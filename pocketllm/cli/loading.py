"""How far loading a model is, on stderr: a bar where somebody watches, a line now and then where not."""

import sys
import time
from contextlib import suppress
from typing import Any

from pocketllm.cli.output import STANDING_BARS, say

PATIENCE_S = 1.0
"""What is loaded sooner needs no bar."""
LINE_EVERY_S = 10.0


def say_fetches(line: str) -> None:
    """Of all lines of progress the one that says what is fetched: a download is never made without a word."""
    from pocketllm.engine.weights.fetching import FETCHING

    if line.startswith(FETCHING):
        say(line)


class LoadingBar:
    """Call it with bytes done and bytes in all; it draws nothing in the first second, and goes away when left."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.next_line_s = LINE_EVERY_S
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away and give the terminal its cursor back."""
        if self.bar is not None:
            self.bar.stop()
            with suppress(ValueError):  # stopped before
                STANDING_BARS.remove(self)

    def __call__(self, done: int, total: int) -> None:
        passed_s = time.perf_counter() - self.start_s
        if not sys.stderr.isatty():
            if passed_s >= self.next_line_s:
                self.next_line_s = passed_s + LINE_EVERY_S
                say(progress_text(done, total))
        elif self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif passed_s >= PATIENCE_S:
            self.draw(done, total)

    def draw(self, done: int, total: int) -> None:
        """Begin the bar; rich is imported for it only."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("loading", total=total, completed=done)
        STANDING_BARS.append(self)
        self.bar.start()


def progress_text(done: int, total: int) -> str:
    """Bytes done of all, in units that a small model does not vanish in."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"loaded {done / unit:.1f} of {total / unit:.1f} {name}"
