"""What `--batch-invariant` promises, and every reason why it cannot be kept; part of the plan."""

from collections.abc import Mapping
from typing import Any

from pocketllm.engine.backends.api.capability import BackendCapability
from pocketllm.engine.models.contract import ModelFamily
from pocketllm.engine.plan.sizes import SizedOptions


def variances(
    options: SizedOptions, family: ModelFamily, capability: BackendCapability, metadata: Mapping[str, Any]
) -> list[str]:
    """What would let a request's bits depend on its company or on its steps, where that must not be."""
    if not options.batch_invariant:
        return []
    if not capability.invariant_ops:
        return [f"backend {capability.name} does not promise what --batch-invariant asks for"]
    reasons = [
        f"backend {capability.name} gives {op}, which family {family.architecture} needs, other bits in other steps: "
        "leave out --batch-invariant"
        for op in sorted((family.capability.ops_of(metadata) & capability.ops) - capability.invariant_ops)
    ]
    width = capability.batch_invariant_width
    if options.max_num_batched_tokens > width:
        reasons.append(
            f"backend {capability.name} keeps a row's bits in steps of up to {width} rows, and max_num_batched_tokens "
            f"is {options.max_num_batched_tokens}: set --max-num-batched-tokens {width}"
        )
    if capability.answers_apart and options.reserve < 1.0:
        reasons.append(
            f"with reserve={options.reserve} answers may be recomputed, and on backend {capability.name} they would "
            "have other bits then: leave out --reserve, or --batch-invariant"
        )
    return reasons


def invariance_notes(options: SizedOptions, capability: BackendCapability) -> list[str]:
    """What --batch-invariant promises, and what it costs."""
    if not options.batch_invariant:
        return []
    notes = [
        "batch-invariant: a request has the same bits in any company, however its prompt is cut into steps, and "
        "whether or not its first tokens come from the prefix cache"
    ]
    if capability.answers_apart and options.prefix_cache:
        notes.append("batch-invariant: the prefix cache finds prompts again, not answers, which have other bits")
    return notes
