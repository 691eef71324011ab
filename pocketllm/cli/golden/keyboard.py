"""Single keys of a terminal, without waiting for a line; what is typed ahead is kept."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Keyboard:
    """Reads keys while it is open, and gives whole lines back to the terminal for a while. POSIX terminals only."""

    def __init__(self) -> None:
        import termios

        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)

    def __enter__(self) -> "Keyboard":
        import termios
        import tty

        tty.setcbreak(self._fd, termios.TCSANOW)  # now: what was pressed while the page was drawn still counts
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def key(self) -> str:
        """The next key; the empty text when the terminal has gone."""
        return os.read(self._fd, 1).decode(errors="replace")

    @contextmanager
    def lines(self) -> Iterator[None]:
        """Lines with an echo again, for an answer in words."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
