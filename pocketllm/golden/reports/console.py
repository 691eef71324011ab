"""Where golden's pages are printed: fitted to a terminal, whole where there is none."""

from typing import TYPE_CHECKING

from pocketllm.evidence.pages.layout import UNBOUNDED, columns

if TYPE_CHECKING:
    from rich.console import Console


def open_console(highlight: bool = True) -> "Console":
    """Standard output; no line is wrapped or cut in a pipe or a file, unless COLUMNS says how wide it is."""
    from rich.console import Console

    return Console(highlight=highlight, width=UNBOUNDED if columns() is None else None)
