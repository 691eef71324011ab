"""The Python API: `LLM` over an engine in this process."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RequestError
from pocketllm.golden.compare import Observed
from pocketllm.golden.entry_points import without_stops
from pocketllm.golden.fixture import Case

if TYPE_CHECKING:
    from pocketllm.engine.llm import LLM
    from pocketllm.golden.subject import Subject


@contextmanager
def load(subject: "Subject") -> Iterator["LLM"]:
    """An LLM for a subject: over the engine it already has, else over one that is loaded now and closed afterwards."""
    from pocketllm.engine.llm import LLM

    if subject.engine is not None:
        yield LLM.from_engine(subject.engine)
        return
    from pocketllm.engine.load import load_engine

    engine = load_engine(subject.options)
    try:
        yield LLM.from_engine(engine)
    finally:
        engine.close()


def generate(llm: "LLM", case: Case, logprobs: int | None = None) -> Any:
    """One GenerationResult for a case."""
    params = case.params(logprobs)
    if case.kind == "chat":
        return llm.chat([dict(message) for message in case.messages], params)[0]
    return llm.generate([case.prompt], params)[0]


def scores(llm: "LLM", prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...]:
    """Natural logprob of each token of an answer, given all before it, in one forward."""
    from pocketllm.engine.lifecycle.sampling.logprobs import token_logprobs

    logits = llm.prompt_logits([*prompt_ids, *answer_ids[:-1]])[-len(answer_ids) :]
    return tuple(token_logprobs(row, one, 0).chosen for row, one in zip(logits, answer_ids, strict=True))


class InProcess:
    """Asks an LLM; a request that the engine refuses has status 400, as over HTTP."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        """Ask and wait; `is_stream` and `on_first` are for HTTP alone."""
        return self._observe(lambda: generate(self._llm, case, logprobs=0))

    def resume(self, case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        """Go on after these tokens."""
        params = without_stops(case, max_tokens).params(logprobs=0)
        return self._observe(lambda: self._llm.generate([token_ids], params)[0])

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...] | None:
        """In one forward over all of them."""
        return scores(self._llm, prompt_ids, answer_ids)

    def _observe(self, ask: Callable[[], Any]) -> Observed:
        began_s = time.perf_counter()
        try:
            result = ask()
        except RequestError as error:
            return Observed(status=400, error=str(error))
        return observe(result, time.perf_counter() - began_s)


def observe(result: Any, e2el_s: float) -> Observed:
    """A GenerationResult as an observation."""
    return Observed(
        prompt_token_ids=tuple(result.prompt_token_ids),
        token_ids=tuple(result.token_ids),
        text=result.text,
        finish_reason=result.finish_reason,
        num_prompt_tokens=result.usage.prompt_tokens,
        num_output_tokens=result.usage.completion_tokens,
        num_cached_tokens=result.usage.cached_tokens,
        logprobs=None if result.logprobs is None else tuple(entry.chosen for entry in result.logprobs),
        ttft_s=result.timings.ttft_s,
        e2el_s=e2el_s,
    )
