"""How large steps are: what was said, or what the backend is made for; part of the plan."""

from dataclasses import dataclass, fields

from pocketllm.engine.backends.api.capability import StepSizes
from pocketllm.engine.options import EngineOptions

NAMES = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk")


@dataclass(frozen=True)
class SizedOptions(EngineOptions):
    """Options in which every size of a step is known."""

    max_num_seqs: int = StepSizes.max_num_seqs
    max_num_batched_tokens: int = StepSizes.max_num_batched_tokens
    prefill_chunk: int = StepSizes.prefill_chunk


def sized(options: EngineOptions, sizes: StepSizes) -> SizedOptions:
    """Fill in what was not said; a budget that was not is never below one token for each request.

    Raises OptionError where what was said does not go with what was not.
    """
    values = {item.name: getattr(options, item.name) for item in fields(options)}
    ordinary = {name: getattr(sizes, name) for name in NAMES}
    ordinary["max_num_batched_tokens"] = max(ordinary["max_num_batched_tokens"], options.max_num_seqs or 0)
    return SizedOptions(**{**values, **{name: ordinary[name] for name in NAMES if values[name] is None}})
