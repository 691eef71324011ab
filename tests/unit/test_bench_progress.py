"""The progress bar of a benchmark in a narrow terminal."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from pocketllm.cli.bench.progress import Bar


def test_in_80_columns_the_bar_shows_the_whole_count_and_every_interval() -> None:
    done: Any = SimpleNamespace(
        slots=19, total=72, arm="base", block=3, left_s=18.0, interval="c 0.841 to 0.929, null 0.886 to 1.033"
    )
    bar = Bar()
    bar.slot_done(done)
    screen = Console(width=80, file=io.StringIO())
    screen.print(bar.rich.get_renderable())
    shown = screen.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above

    assert "19/72" in shown
    assert "null 0.886 to 1.033" in " ".join(shown.split())
