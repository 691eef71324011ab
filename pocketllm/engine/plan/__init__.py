"""What will run, decided from the checkpoint's header before a weight is read, or every reason why it cannot.

This is the only place that says no to a configuration; the scheduler, the server, `check` and every record read the
plan. Nothing here is clamped: a value the user gave is kept or refused, and a value left open is resolved and shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelFamily
from pocketllm.engine.options import AUTO, EngineOptions
from pocketllm.engine.plan.invariance import invariance_notes, variances
from pocketllm.engine.plan.memory import (
    Demand,
    MemoryPlan,
    Window,
    demand_of,
    keeps_prompt_ends,
    loaded_tensors,
    num_state_slots,
    plan_memory,
)
from pocketllm.engine.plan.sizes import SizedOptions, sized
from pocketllm.engine.weights.quant import known_types
from pocketllm.errors import UnsupportedFeatureError

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class Limits:
    """What the scheduler works within."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    block_size: int
    num_blocks: int
    watermark: float
    reserve: float
    max_queued_requests: int
    prefix_cache: bool = True
    """Whether full blocks are found again by the tokens they hold."""
    num_state_slots: int = 0
    """Recurrent states that there is room for, of running requests and snapshots; 0 for a model that has none."""
    keeps_prompt_ends: bool = False
    """Whether a prompt that is repeated whole computes nothing, of a model with recurrent states."""
    max_steps_in_flight: int = 1
    """1: a step's tokens are known before the next is launched. 2: the next is launched while they are being drawn."""
    window: int = 0
    """How many of the latest tokens layers that see a window look at; 0 for a model without such layers."""
    window_blocks_per_request: int = 0
    """Most blocks of those layers that one request has at once."""
    num_window_blocks: int = 0
    """How many there are for all."""
    answers_apart: bool = False
    """Whether tokens of answers are told to the backend, and kept out of the prefix cache: there they have other bits
    than in a prompt."""


@dataclass(frozen=True)
class EnginePlan:
    """One configuration that runs: what was asked, what it became, and what it costs."""

    model: str
    architecture: str
    quant_types: Mapping[str, Mapping[str, int]]
    """Tensors and bytes by GGUF type name."""
    backend: str
    device: str
    device_name: str
    isa: str | None
    """Instruction set of the kernels, where the backend has a choice of them."""
    threads: int
    activation_dtype: str
    kv_dtype: str
    numerics_version: str
    batch_invariant_width: int
    context_length: int
    """Longest context the checkpoint was made for."""
    weights_bytes: int
    kv_bytes_per_token: int
    """Over all layers that keep every token."""
    window_bytes_per_request: int
    """What a long request takes beside them in layers that see a window; 0 for a model without such layers."""
    kv_bytes: int
    """Both, for all requests."""
    state_bytes: int
    """Recurrent states of running requests and snapshots, and logits of prompts' ends; 0 for a model without states."""
    scratch_bytes: int
    """What a step of the widest kind works in, beside weights and cache; an estimate from the header."""
    step_widths: tuple[int, ...]
    """Numbers of requests in a step that a server has made ready before it serves."""
    limits: Limits
    notes: tuple[str, ...]
    options: Mapping[str, Any]
    sources: Mapping[str, str]
    """Where each option came from: flag, environment, file or default."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; the limits stand beside the rest."""
        values = asdict(self)
        limits: dict[str, Any] = values.pop("limits")
        return {**values, **limits, "step_widths": list(self.step_widths), "notes": list(self.notes)}


def backend_options(options: EngineOptions, family: ModelFamily | str | None = None) -> BackendOptions:
    """The part of the options that a backend answers for, and what a model's family needs of it where it has one."""
    wishes = BackendOptions(
        options.threads, options.activation_dtype, options.kv_dtype, batch_invariant=options.batch_invariant
    )
    if family is None or isinstance(family, str):
        return wishes
    return replace(wishes, least_activations=family.capability.least_activations)


def make_plan(
    options: EngineOptions,
    family: ModelFamily | str,
    capability: BackendCapability,
    checkpoint: Checkpoint,
    *,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> EnginePlan:
    """Merge options, family, backend and header into a plan.

    family: the family, or the sentence that says why there is none. Raises UnsupportedFeatureError with all reasons.
    """
    model, options = model or options.model, sized(options, capability.sizes)
    what = f"cannot run {model} ({architecture_of(checkpoint)})"
    tables = frozenset() if isinstance(family, str) else family.capability.tables
    unreadable = unreadable_tensors(checkpoint, capability, tables)
    if isinstance(family, str):
        raise UnsupportedFeatureError(what, [family, *unreadable])
    unmet = unmet_capabilities(options, family, capability, checkpoint.metadata)
    variant = variances(options, family, capability, checkpoint.metadata)
    reasons = [*family.unmet(checkpoint), *unreadable, *unmet, *variant]
    if reasons:
        raise UnsupportedFeatureError(f"{what} on {capability.name}", reasons)

    context, spec = family.context_length(checkpoint.metadata), family.kv_spec(checkpoint.metadata)
    demand = demand_of(options, spec, checkpoint, capability)
    memory = plan_memory(options, context, demand, capability.memory_bytes, capability.sizes.kv_cache_bytes)
    if memory.reasons:
        raise UnsupportedFeatureError(f"{what} on {capability.name}", memory.reasons)
    limits = make_limits(options, memory, demand.window, spec, capability)
    return EnginePlan(
        model=model,
        architecture=architecture_of(checkpoint),
        quant_types=histogram(checkpoint),
        **of_backend(capability),
        context_length=context,
        **of_memory(demand, memory, limits),
        step_widths=tuple(width for width in capability.step_widths if width <= options.max_num_seqs),
        limits=limits,
        notes=(*notes, *memory.notes, *plan_notes(options, family, capability)),
        options={**options.as_dict(), "model": model},  # a path of this machine has no place in a record
        sources=dict(options.sources),
    )


def of_backend(capability: BackendCapability) -> dict[str, Any]:
    """What a plan says of its backend."""
    return {
        "backend": capability.name,
        "device": capability.device,
        "device_name": capability.device_name,
        "isa": capability.isa,
        "threads": capability.threads,
        "activation_dtype": capability.activation_dtype,
        "kv_dtype": capability.kv_dtype,
        "numerics_version": capability.numerics_version,
        "batch_invariant_width": capability.batch_invariant_width,
    }


def of_memory(demand: Demand, memory: MemoryPlan, limits: Limits) -> dict[str, Any]:
    """What a plan says of memory, in bytes."""
    window_bytes = limits.block_size * demand.window.bytes_per_token
    return {
        "weights_bytes": demand.weights,
        "kv_bytes_per_token": demand.per_token,
        "window_bytes_per_request": limits.window_blocks_per_request * window_bytes,
        "kv_bytes": limits.num_blocks * limits.block_size * demand.per_token + limits.num_window_blocks * window_bytes,
        "state_bytes": demand.states,
        "scratch_bytes": demand.scratch.of(memory.max_model_len),
    }


def architecture_of(checkpoint: Checkpoint) -> str:
    """As the header calls it."""
    return str(checkpoint.metadata.get("general.architecture", "unknown"))


def plan_first(
    options: EngineOptions,
    family: ModelFamily | str,
    offers: Sequence[BackendBid],
    checkpoint: Checkpoint,
    *,
    model: str | None = None,
) -> tuple[EnginePlan, Sequence[str]]:
    """The plan of the first offer that can run the checkpoint, and the note that says why it and not another.

    Raises UnsupportedFeatureError with every reason, each once, when none can.
    """
    absent = [f"{bid.name}: {bid.reason}" for bid in offers if bid.capability is None]
    refused: dict[str, Sequence[str]] = {}
    passed: list[str] = []
    for bid in offers:
        if bid.capability is None:
            continue
        because = f" ({'; '.join([*passed, *absent])})" if passed or absent else ""
        notes = [f"backend auto chose {bid.name}{because}"] if options.backend == AUTO else []
        try:
            return make_plan(options, family, bid.capability, checkpoint, model=model, notes=notes), notes
        except UnsupportedFeatureError as error:
            if len(offers) == 1:
                raise
            refused[bid.name] = error.reasons
            passed.append(f"{bid.name}: {', '.join(error.reasons)}")
    what = f"cannot run {model or options.model} ({architecture_of(checkpoint)})"
    # a backend that is not here could help only where another one lacked something
    reasons = told_apart(refused)
    is_lacking = not isinstance(family, str) and any(reason.startswith("backend ") for reason in reasons)
    raise UnsupportedFeatureError(what, [*reasons, *(f"backend {reason}" for reason in absent if is_lacking)])


def told_apart(refused: Mapping[str, Sequence[str]]) -> list[str]:
    """Every backend's reasons, each once; one that not all of them share says whose it is."""
    shared = set.intersection(*map(set, refused.values())) if refused else set()
    reasons = [
        reason if reason in shared or reason.startswith("backend ") else f"on {name}: {reason}"
        for name, of_backend in refused.items()
        for reason in of_backend
    ]
    return list(dict.fromkeys(reasons))


# -- reasons ---------------------------------------------------------------------------------------------------------
def unreadable_tensors(
    checkpoint: Checkpoint, capability: BackendCapability, tables: frozenset[str] = frozenset()
) -> list[str]:
    """One reason for each quant type that the backend cannot keep, with an example of a tensor that has it.

    tables: see `ModelCapability.tables`.
    """
    examples: dict[str, list[str]] = {}
    for name, tensor in loaded_tensors(checkpoint).items():
        is_readable = tensor.quant_type in capability.quant_types or name.split(".", 2)[-1] in tables
        if len(tensor.shape) < 2:
            is_readable = is_readable or tensor.quant_type in PLAIN_TYPES
        if not is_readable:
            examples.setdefault(tensor.quant_type, []).append(name)
    return [
        f"backend {capability.name} cannot decode quant type {quant_type} ({len(names)} tensors, such as {names[0]}); "
        f"it decodes {', '.join(sorted(capability.quant_types))}"
        + (": take --backend reference, which decodes this one" if quant_type in known_types() else "")
        for quant_type, names in sorted(examples.items())
    ]


def unmet_capabilities(
    options: SizedOptions, family: ModelFamily, capability: BackendCapability, metadata: Mapping[str, Any]
) -> list[str]:
    """What the options and the family need and the backend, or the family, does not have."""
    missing = sorted(family.capability.ops_of(metadata) - capability.ops)
    reasons = [
        f"backend {capability.name} has no op {op}"
        + (f" with --kv-dtype {capability.kv_dtype}" if op in capability.wider_ops else "")
        + f", which family {family.architecture} needs"
        + (": take --kv-dtype float16" if op in capability.wider_ops else "")
        for op in missing
    ]
    width = family.capability.max_num_seqs
    if width is not None and options.max_num_seqs > width:
        reasons.append(
            f"family {family.architecture} runs at most {width} requests in a step, and max_num_seqs is "
            f"{options.max_num_seqs}: set --max-num-seqs {width}"
        )
    if not family.capability.supports_chunked_prefill and options.prefill_chunk < options.max_num_batched_tokens:
        reasons.append(
            f"family {family.architecture} cannot split a prompt: set --prefill-chunk {options.max_num_batched_tokens}"
        )
    return reasons


# -- notes -----------------------------------------------------------------------------------------------------------
def plan_notes(options: SizedOptions, family: ModelFamily, capability: BackendCapability) -> list[str]:
    """What the reader of a plan should know beyond its numbers."""
    return [
        *activation_notes(options, family),
        *invariance_notes(options, capability),
        *width_notes(options, capability),
        *thread_notes(capability),
        *delay_notes(options),
    ]


def delay_notes(options: EngineOptions) -> list[str]:
    """What must be shouted of an engine that is slow on purpose."""
    if not options.test_step_delay:
        return []
    return [f"SLOWED ON PURPOSE: test_step_delay makes every step {options.test_step_delay:.1%} longer"]


def activation_notes(options: EngineOptions, family: ModelFamily) -> list[str]:
    """What activations cost that the user asked for and the family would not."""
    asked, bits = options.activation_dtype, family.capability.activation_bits
    if asked not in ("int8", "mixed") or bits <= 8:
        return []
    return [f"family {family.architecture} needs activations of {bits} bits to pick what exact ones pick, not {asked}"]


def width_notes(options: SizedOptions, capability: BackendCapability) -> list[str]:
    """What the reader of a plan should know about exactness, beyond the numbers."""
    if options.max_num_batched_tokens <= capability.batch_invariant_width:
        return []
    return [
        f"steps may have {options.max_num_batched_tokens} rows, and backend {capability.name} promises results "
        f"independent of neighbors up to {capability.batch_invariant_width}"
    ]


def thread_notes(capability: BackendCapability) -> list[str]:
    """More threads than cores: they wait for one another whenever work is shared out."""
    cores = capability.num_cores
    if cores is None or capability.threads <= cores:
        return []
    return [f"{capability.threads} threads on the {cores} cores that this process may use: fewer are faster"]


def make_limits(
    options: SizedOptions, memory: MemoryPlan, window: Window, spec: CacheSpec, capability: BackendCapability
) -> Limits:
    """What was asked for, at the context and cache size that it became."""
    return Limits(
        max_model_len=memory.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefill_chunk=options.prefill_chunk,
        block_size=options.block_size,
        num_blocks=memory.num_blocks,
        watermark=options.watermark,
        reserve=options.reserve,
        max_queued_requests=options.max_queued_requests,
        prefix_cache=options.prefix_cache,
        num_state_slots=num_state_slots(options, spec),
        keeps_prompt_ends=keeps_prompt_ends(options, spec, capability),
        max_steps_in_flight=window.steps_in_flight,
        window=window.size,
        window_blocks_per_request=window.num_blocks(options, memory.max_model_len),
        num_window_blocks=memory.num_window_blocks,
        answers_apart=options.batch_invariant and capability.answers_apart,
    )


def histogram(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Tensors and bytes by quant type."""
    result: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        entry = result.setdefault(tensor.quant_type, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.num_bytes
    return dict(sorted(result.items()))
