"""The ways to ask: one file an entry point. Each gives back `compare.Observed`; NotJudgedError where it cannot ask."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pocketllm.golden.compare import Observed
from pocketllm.golden.fixture import Case

if TYPE_CHECKING:
    from pocketllm.golden.subject import Subject


class Client(Protocol):
    """One entry point that is open."""

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        """Ask and wait for the whole answer."""


@contextmanager
def open_client(entry_point: str, subject: "Subject") -> Iterator[Client]:
    """Open `in_process` or `generate` for a checkpoint; HTTP needs a server, see `served_path`."""
    if entry_point == "generate":
        from pocketllm.golden.entry_points.generate import Generate

        yield Generate(subject)
        return
    from pocketllm.golden.entry_points.in_process import InProcess, load

    with load(subject) as llm:
        yield InProcess(llm)
