"""pocketllm: honest benchmarking and golden verification, over a full LLM inference engine.

Importing this package imports nothing heavy: torch, pandas and pyarrow arrive with what needs them, and the Python API
(`LLM`, `AsyncLLM`, `SamplingParams`) when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pocketllm.engine.lifecycle.request import FinishEvent, TokenEvent
    from pocketllm.engine.lifecycle.result import GenerationResult
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams
    from pocketllm.engine.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "FinishEvent", "GenerationResult", "SamplingParams", "TokenEvent"]

_HOMES = {
    "LLM": "pocketllm.engine.llm",
    "AsyncLLM": "pocketllm.engine.llm",
    "GenerationResult": "pocketllm.engine.lifecycle.result",
    "SamplingParams": "pocketllm.engine.lifecycle.sampling.params",
    "FinishEvent": "pocketllm.engine.lifecycle.request",
    "TokenEvent": "pocketllm.engine.lifecycle.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
