"""What will run, decided from the checkpoint's header before a weight is read, or every reason why it cannot.

This is the only place that says no to a configuration; the scheduler, the server, `check` and every record read the
plan. Nothing here is clamped: a value the user gave is kept or refused, and a value left open is resolved and shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, ModelFamily, bytes_in_blocks
from pocketllm.engine.models.header import nextn_tensors
from pocketllm.engine.options import AUTO, EngineOptions
from pocketllm.engine.weights.quant import known_types
from pocketllm.errors import UnsupportedFeatureError

DEFAULT_KV_BYTES = 1 << 30
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
    kv_bytes: int
    state_bytes: int
    """Recurrent states of running requests and snapshots, and logits of prompts' ends; 0 for a model without states."""
    scratch_bytes: int
    """What a step of the widest kind works in, beside weights and cache; an estimate from the header."""
    limits: Limits
    notes: tuple[str, ...]
    options: Mapping[str, Any]
    sources: Mapping[str, str]
    """Where each option came from: flag, environment, file or default."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; the limits stand beside the rest."""
        values = asdict(self)
        limits: dict[str, Any] = values.pop("limits")
        return {**values, **limits, "notes": list(self.notes)}


def backend_options(options: EngineOptions) -> BackendOptions:
    """The part of the options that a backend answers for."""
    return BackendOptions(options.threads, options.activation_dtype, options.kv_dtype)


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
    model = model or options.model
    architecture = str(checkpoint.metadata.get("general.architecture", "unknown"))
    tables = frozenset() if isinstance(family, str) else family.capability.tables
    reasons = unreadable_tensors(checkpoint, capability, tables)
    if isinstance(family, str):
        raise UnsupportedFeatureError(f"cannot run {model} ({architecture})", [family, *reasons])
    reasons = [*family.unmet(checkpoint), *reasons, *unmet_capabilities(options, family, capability, checkpoint.metadata)]
    if reasons:
        raise UnsupportedFeatureError(f"cannot run {model} ({architecture}) on {capability.name}", reasons)

    context = family.context_length(checkpoint.metadata)
    spec = family.kv_spec(checkpoint.metadata)
    per_token = bytes_in_blocks(spec, capability.kv_element_bytes, capability.kv_scale_bytes, options.block_size)
    states = num_state_slots(options, spec) * spec.bytes_per_sequence()
    weights = weights_bytes(checkpoint, capability)
    scratch = step_scratch(options, checkpoint, capability)
    ends = prompt_end_bytes(options, spec, checkpoint, capability)
    memory = plan_memory(options, context, per_token, weights + states + ends, capability.memory_bytes, scratch)
    if memory.reasons:
        raise UnsupportedFeatureError(f"cannot run {model} ({architecture}) on {capability.name}", memory.reasons)
    return EnginePlan(
        model=model,
        architecture=architecture,
        quant_types=histogram(checkpoint),
        backend=capability.name,
        device=capability.device,
        device_name=capability.device_name,
        isa=capability.isa,
        threads=capability.threads,
        activation_dtype=capability.activation_dtype,
        kv_dtype=capability.kv_dtype,
        numerics_version=capability.numerics_version,
        batch_invariant_width=capability.batch_invariant_width,
        context_length=context,
        weights_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_bytes=memory.num_blocks * options.block_size * per_token,
        state_bytes=states + ends,
        scratch_bytes=scratch.of(memory.max_model_len),
        limits=make_limits(
            options,
            memory,
            num_state_slots(options, spec),
            keeps_prompt_ends(options, spec, capability),
            max_steps_in_flight(options, spec, capability),
        ),
        notes=(*notes, *memory.notes, *width_notes(options, capability), *delay_notes(options)),
        options={**options.as_dict(), "model": model},  # a path of this machine has no place in a record
        sources=dict(options.sources),
    )


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
    what = f"cannot run {model or options.model} ({checkpoint.metadata.get('general.architecture', 'unknown')})"
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
    options: EngineOptions, family: ModelFamily, capability: BackendCapability, metadata: Mapping[str, Any]
) -> list[str]:
    """What the options and the family need and the backend, or the family, does not have."""
    reasons = [
        f"backend {capability.name} has no op {op}, which family {family.architecture} needs"
        for op in sorted(family.capability.ops_of(metadata) - capability.ops)
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


def delay_notes(options: EngineOptions) -> list[str]:
    """What must be shouted of an engine that is slow on purpose."""
    if not options.test_step_delay:
        return []
    return [f"SLOWED ON PURPOSE: test_step_delay makes every step {options.test_step_delay:.1%} longer"]


def width_notes(options: EngineOptions, capability: BackendCapability) -> list[str]:
    """What the reader of a plan should know about exactness, beyond the numbers."""
    if options.max_num_batched_tokens <= capability.batch_invariant_width:
        return []
    return [
        f"steps may have {options.max_num_batched_tokens} rows, and backend {capability.name} promises results "
        f"independent of neighbors up to {capability.batch_invariant_width}"
    ]


# -- memory ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scratch:
    """Working memory of a step, in bytes: a part of its own, and a part that grows with the longest request."""

    fixed: int = 0
    per_key: int = 0

    def of(self, length: int) -> int:
        """All of it when the longest request has that many tokens."""
        return self.fixed + self.per_key * length


NO_SCRATCH = Scratch()


@dataclass(frozen=True)
class MemoryPlan:
    """Context and cache size, or the reasons why they cannot be had."""

    max_model_len: int
    num_blocks: int
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


COPY = "copy_blocks"
"""The op without which no end of a prompt is kept."""
TABLES = ("token_embd.weight", "output.weight")
"""Matrices with a row a token of the vocabulary."""


def step_scratch(options: EngineOptions, checkpoint: Checkpoint, capability: BackendCapability) -> Scratch:
    """Rows in and out of the widest matrices, logits and a sampler's copy of them, and attention's scores."""
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) >= 2]
    tables = [tensor.shape[0] for tensor in matrices if tensor.name in TABLES]
    widest = max((tensor.shape[-2] for tensor in matrices if tensor.shape[0] not in tables), default=0)
    rows = 4 * 4 * options.max_num_batched_tokens * widest  # in, two products, and what they become, in float32
    logits = 2 * 4 * options.max_num_seqs * max(tables, default=0)
    queries = min(options.prefill_chunk, options.max_num_batched_tokens)
    heads = query_heads(checkpoint.metadata)
    return Scratch(rows + logits, capability.attention_scratch_bytes * heads * queries)


def query_heads(metadata: Mapping[str, Any]) -> int:
    """Most query heads of a layer, from the header; 1 where it does not say."""
    count = metadata.get(f"{metadata.get('general.architecture')}.attention.head_count", 1)
    return max(map(int, count)) if hasattr(count, "__iter__") else int(count)


def plan_memory(
    options: EngineOptions,
    context: int,
    bytes_per_token: int,
    weights: int,
    available: int | None,
    scratch: Scratch = NO_SCRATCH,
) -> MemoryPlan:
    """Size the cache. All sizes in bytes; `available` None: unknown, and then nothing is refused for it.

    weights: with whatever else is there whole from the beginning (recurrent states).
    """
    length = options.max_model_len or context
    reasons = []
    if length > context:
        reasons.append(
            f"max_model_len={length} is longer than the checkpoint's context of {context} tokens: lower --max-model-len"
        )
    block_bytes = options.block_size * bytes_per_token
    blocks_per_request = -(-length // options.block_size)
    one_request = blocks_per_request * block_bytes
    room = None if available is None else available - weights - scratch.of(length)
    if options.kv_cache_bytes is not None:
        num_blocks = options.kv_cache_bytes // block_bytes
        if num_blocks < blocks_per_request:
            reasons.append(
                f"kv_cache_bytes={options.kv_cache_bytes} holds {num_blocks * options.block_size} tokens, fewer than "
                f"one request of max_model_len={length}: give {one_request} bytes or lower --max-model-len"
            )
    else:
        wanted = options.max_num_seqs * one_request
        budget = min(wanted, DEFAULT_KV_BYTES) if room is None else min(wanted, DEFAULT_KV_BYTES, max(room, 0))
        num_blocks = max(budget // block_bytes, blocks_per_request)
    needed = weights + num_blocks * block_bytes + scratch.of(length)
    if available is not None and needed > available:
        a_block = block_bytes + options.block_size * scratch.per_key
        fitting = min(max(available - weights - scratch.fixed, 0) // a_block * options.block_size, context)
        advice = f"set --max-model-len {fitting} or lower" if fitting else "take a smaller checkpoint"
        if options.kv_cache_bytes is not None and room is not None and room >= one_request:
            advice = f"set --kv-cache-bytes {room} or lower"
        elif not fitting and options.block_size > length:
            advice = "lower --block-size"
        reasons.append(
            f"weights, cache and working memory need {gib(needed)} ({gib(weights)} + {gib(num_blocks * block_bytes)} + "
            f"{gib(scratch.of(length))} for {length} tokens) of {gib(available)} available: {advice}"
        )
    notes = []
    num_full = num_blocks // blocks_per_request
    if not reasons and num_full < options.max_num_seqs:
        notes.append(
            f"the cache holds {num_full} requests of max_model_len={length} at once, not max_num_seqs="
            f"{options.max_num_seqs}; shorter ones share it"
        )
    return MemoryPlan(length, num_blocks, tuple(notes), tuple(reasons))


def keeps_prompt_ends(options: EngineOptions, spec: CacheSpec, capability: BackendCapability) -> bool:
    """Whether what the ends of prompts leave is kept, see `PromptEnds`."""
    return bool(num_state_slots(options, spec)) and options.prefix_cache and COPY in capability.ops


def prompt_end_bytes(
    options: EngineOptions, spec: CacheSpec, checkpoint: Checkpoint, capability: BackendCapability
) -> int:
    """Bytes of the logits that are kept of prompts' ends: a row of float32 for each of max_num_seqs."""
    if not keeps_prompt_ends(options, spec, capability):
        return 0
    rows = [checkpoint.tensors[name].shape[0] for name in TABLES if name in checkpoint.tensors]
    return 4 * options.max_num_seqs * max(rows, default=0)


def num_state_slots(options: EngineOptions, spec: CacheSpec) -> int:
    """One for each running request, and as many for snapshots where prefixes are found again."""
    return options.max_num_seqs * (2 if options.prefix_cache else 1) if spec.bytes_per_sequence() else 0


def max_steps_in_flight(options: EngineOptions, spec: CacheSpec, capability: BackendCapability) -> int:
    """What the backend takes, unless it was switched off; one where states are kept: a state cannot be told apart from
    that of a token further, so it is copied before the next step begins."""
    return capability.max_steps_in_flight if options.overlap and not spec.bytes_per_sequence() else 1


def make_limits(
    options: EngineOptions,
    memory: MemoryPlan,
    num_state_slots: int,
    keeps_prompt_ends: bool,
    max_steps_in_flight: int,
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
        num_state_slots=num_state_slots,
        keeps_prompt_ends=keeps_prompt_ends,
        max_steps_in_flight=max_steps_in_flight,
    )


def gib(num_bytes: int) -> str:
    """A size for people.

    >>> gib(3 << 29)
    '1.50 GiB'
    """
    return f"{num_bytes / (1 << 30):.2f} GiB"


def weights_bytes(checkpoint: Checkpoint, capability: BackendCapability) -> int:
    """Bytes the weights take once the backend has loaded them; vectors are float32 everywhere."""
    total = 0.0
    for tensor in loaded_tensors(checkpoint).values():
        per_element = capability.weight_bytes_per_element.get(tensor.quant_type)
        if len(tensor.shape) < 2:
            per_element = 4.0
        total += tensor.num_bytes if per_element is None else prod(tensor.shape) * per_element
    return ceil(total)


def loaded_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Tensor descriptions by name, without those of layers that are not computed."""
    unread = nextn_tensors(checkpoint)
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in unread}


def histogram(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Tensors and bytes by quant type."""
    result: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        entry = result.setdefault(tensor.quant_type, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.num_bytes
    return dict(sorted(result.items()))
