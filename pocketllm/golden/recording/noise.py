"""The noise floor of an answer: the same request under everything that may change without changing the hard key.

Scheduling, batch width, prefill chunks, threads and scoring instead of decoding are all the same numerics, so what they
do to a logprob is noise. The reference backend computes with other numerics; its distance says how far rounding may go.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pocketllm.golden.compare import first_difference, shift
from pocketllm.golden.entry_points.in_process import generate, load, scores
from pocketllm.golden.fixture import Case, Floor

if TYPE_CHECKING:
    from pocketllm.engine.llm import LLM
    from pocketllm.golden.subject import Subject

SMALL_CHUNK = 64
THREADS = (1, 2)
REFERENCE = "reference"

Differences = list[float]
"""Logprob less recorded logprob, of each recorded token that a variation agreed on."""


class Variations:
    """The engines that a recording varies, each loaded when it is first needed and kept until the recording ends."""

    def __init__(self, subject: "Subject", llm: "LLM", stack: ExitStack) -> None:
        self._subject = subject
        self._llm = llm
        self._stack = stack
        self._loaded: dict[str, LLM] = {}

    def measure(self, case: Case, result: Any) -> tuple[tuple[str, ...], Floor]:
        """Names of the variations, and the floor over all of them. result: the recorded GenerationResult."""
        differences: Differences = []
        names = []
        for name, vary in self._within():
            found = vary(case, result)
            if found is not None:
                names.append(name)
                differences += found
        return tuple(names), floor(differences)

    def reference(self, result: Any) -> Floor | None:
        """The distance to the reference backend; None where that is the one recorded."""
        if self._subject.plan.backend == REFERENCE:
            return None
        return floor(scored(self._other(REFERENCE, backend=REFERENCE, activation_dtype=None, kv_dtype=None), result))

    def _within(self) -> Iterator[tuple[str, Callable[[Case, Any], Differences | None]]]:
        yield "warm cache", lambda case, result: agreed(generate(self._llm, case, logprobs=0), result)
        yield "scored", lambda case, result: scored(self._llm, result)
        yield "width 2", self._beside_itself
        yield f"prefill chunk {SMALL_CHUNK}", self._in_small_chunks
        if self._subject.plan.device == "cpu":
            for count in THREADS:
                yield f"threads {count}", self._with_threads(count)

    def _beside_itself(self, case: Case, result: Any) -> Differences | None:
        params = case.params(logprobs=0)
        self._llm.engine.loop.reset_prefix_cache()
        both = self._llm.generate([result.prompt_token_ids] * 2, params)
        return [difference for one in both for difference in agreed(one, result)]

    def _in_small_chunks(self, case: Case, result: Any) -> Differences | None:
        from pocketllm.engine.llm import LLM

        if len(result.prompt_token_ids) <= SMALL_CHUNK:
            return None
        with LLM.from_engine(self._llm.engine.sibling(prefill_chunk=SMALL_CHUNK)) as llm:
            return agreed(generate(llm, case, logprobs=0), result)

    def _with_threads(self, count: int) -> Callable[[Case, Any], Differences | None]:
        def vary(case: Case, result: Any) -> Differences | None:
            llm = self._other(f"threads {count}", threads=count)
            llm.engine.loop.reset_prefix_cache()
            return agreed(generate(llm, case, logprobs=0), result)

        return vary

    def _other(self, name: str, **options: Any) -> "LLM":
        """An engine of its own with other options."""
        if name not in self._loaded:
            other = replace(self._subject, engine=None, options=replace(self._subject.options, **options))
            self._loaded[name] = self._stack.enter_context(load(other))
        return self._loaded[name]


@contextmanager
def open_variations(subject: "Subject", llm: "LLM") -> Iterator[Variations]:
    """Variations of a recording; their engines end with it."""
    with ExitStack() as stack:
        yield Variations(subject, llm, stack)


def agreed(other: Any, result: Any) -> Differences:
    """Over the tokens that both results begin with."""
    count = first_difference(result.token_ids, other.token_ids)
    pairs = zip(other.logprobs[:count], result.logprobs[:count], strict=False)
    return [one.chosen - recorded.chosen for one, recorded in pairs]


def scored(llm: "LLM", result: Any) -> Differences:
    """Of the recorded tokens, given to an engine as they are."""
    found = scores(llm, result.prompt_token_ids, result.token_ids)
    return [one - recorded.chosen for one, recorded in zip(found, result.logprobs, strict=True)]


def floor(differences: Sequence[float]) -> Floor:
    """Mean and p99 of |Δlogprob|, in three digits that matter."""
    found = shift(differences)
    return Floor(float(f"{found.mean:.3g}"), float(f"{found.p99:.3g}"))
