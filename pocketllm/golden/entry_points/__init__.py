"""The ways to ask: one file an entry point. Each gives back `compare.Observed`; NotJudgedError where it cannot ask."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pocketllm.golden.compare import Observed
from pocketllm.golden.fixture import Case

if TYPE_CHECKING:
    from pocketllm.golden.subject import Subject


class Client(Protocol):
    """One entry point that is open."""

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        """Ask and wait for the whole answer."""

    def resume(self, case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        """What comes after these tokens under the case's sampling, without its stop strings."""

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...] | None:
        """Natural logprob of each token of an answer, given all before it; None where it cannot be had."""


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


def without_stops(case: Case, max_tokens: int) -> Case:
    """The case with another limit and no stop string: the tokens go on, whatever their text is."""
    sampling = {key: value for key, value in case.sampling.items() if key != "stop"}
    return replace(case, sampling={**sampling, "max_tokens": max_tokens})
