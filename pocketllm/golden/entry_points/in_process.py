"""The Python API: `LLM` over an engine in this process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RequestError
from pocketllm.golden.compare import Observed
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


class InProcess:
    """Asks an LLM; a request that the engine refuses has status 400, as over HTTP."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        """Ask and wait; `is_stream` and `on_first` are for HTTP alone."""
        began_s = time.perf_counter()
        try:
            result = generate(self._llm, case)
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
        ttft_s=result.timings.ttft_s,
        e2el_s=e2el_s,
    )
