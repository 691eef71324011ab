"""How much memory a configuration takes, and how much of it the cache may have; part of the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from pocketllm.engine.backends.api.capability import BackendCapability, StepSizes
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, bytes_in_blocks
from pocketllm.engine.models.header import nextn_tensors
from pocketllm.engine.plan.sizes import SizedOptions


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
class Window:
    """Layers that see a window: of how many tokens, and a token's bytes over all of them. 0: there are none."""

    size: int = 0
    bytes_per_token: int = 0
    steps_in_flight: int = 1
    """Steps whose tokens a request may have blocks for at once."""

    def num_blocks(self, options: SizedOptions, length: int) -> int:
        """Most blocks that hold what the steps of a request of that length look at and what they write."""
        if not self.size:
            return 0
        step = min(options.prefill_chunk, options.max_num_batched_tokens)
        num_tokens = self.size - 1 + step * self.steps_in_flight
        # one more than they fill, as the first need not be at the beginning of a block
        return min(-(-(num_tokens - 1) // options.block_size) + 1, -(-length // options.block_size))


NO_WINDOW = Window()


@dataclass(frozen=True)
class Demand:
    """What a model asks of a backend's memory beside its cache, and for each token in it; in bytes."""

    weights: int
    per_token: int
    """Over all layers that keep every token."""
    states: int = 0
    """Recurrent states of running requests and snapshots, and logits of prompts' ends."""
    scratch: Scratch = NO_SCRATCH
    window: Window = NO_WINDOW


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block of the layers that keep every token, and of one of the others, of which a request has `most`."""

    everywhere: int
    window: int
    most: int

    def of(self, num_blocks: int) -> int:
        """What a request of so many blocks takes."""
        return num_blocks * self.everywhere + min(num_blocks, self.most) * self.window

    def longest(self, num_bytes: int) -> int:
        """The most blocks of one request in so many bytes."""
        if num_bytes < self.of(self.most):
            return max(num_bytes, 0) // (self.everywhere + self.window)
        return self.most + (num_bytes - self.of(self.most)) // max(self.everywhere, 1)

    def divide(self, num_bytes: int, num_blocks: int, num_requests: int, spare: int) -> tuple[int, int]:
        """How many blocks of either kind a cache of so many bytes has: at least one request of num_blocks fits.

        Where num_requests fit, windows of `spare` more stay findable. Where they do not, shorter ones share it, each of
        which has a whole window all the same: windows may then take half of it, or more where one request's do.
        """
        most = min(num_blocks, self.most)
        if not most:
            return num_bytes // max(self.everywhere, 1), 0
        each, alone = self.of(num_blocks), num_blocks * self.everywhere
        if num_bytes >= num_requests * each:
            wanted = min((num_requests + spare) * most, num_requests * num_blocks)
            windows = min(wanted, (num_bytes - num_requests * alone) // self.window)
        else:
            share = max(num_bytes // 2, num_bytes * most * self.window // each)
            windows = min(num_requests * most, min(share, num_bytes - alone) // self.window)
        rest = num_bytes - windows * self.window
        return rest // self.everywhere if self.everywhere else num_requests * num_blocks, windows


@dataclass(frozen=True)
class MemoryPlan:
    """Context and cache size, or the reasons why they cannot be had."""

    max_model_len: int
    num_blocks: int
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    num_window_blocks: int = 0


COPY = "copy_blocks"
"""The op without which no end of a prompt is kept."""
TABLES = ("token_embd.weight", "output.weight")
"""Matrices with a row a token of the vocabulary."""


def step_scratch(options: SizedOptions, checkpoint: Checkpoint, capability: BackendCapability) -> Scratch:
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


def demand_of(options: SizedOptions, spec: CacheSpec, checkpoint: Checkpoint, capability: BackendCapability) -> Demand:
    """What a checkpoint asks, decided from its header."""
    element = capability.kv_element_bytes, capability.kv_scale_bytes
    states = num_state_slots(options, spec) * spec.bytes_per_sequence()
    in_flight = max_steps_in_flight(options, spec, capability)
    return Demand(
        weights=weights_bytes(checkpoint, capability),
        per_token=bytes_in_blocks(spec, *element, options.block_size),
        states=states + prompt_end_bytes(options, spec, checkpoint, capability),
        scratch=step_scratch(options, checkpoint, capability),
        window=Window(spec.window_tokens(), spec.bytes_in_window(*element), in_flight),
    )


def plan_memory(
    options: SizedOptions,
    context: int,
    demand: Demand,
    available: int | None,
    kv_limit: int = StepSizes.kv_cache_bytes,
) -> MemoryPlan:
    """Size the cache. All sizes in bytes; `available` None: unknown, and then nothing is refused for it.

    kv_limit: most that the cache takes where its size was not said and one request does not need more.
    """
    length, size, window = options.max_model_len or context, options.block_size, demand.window
    num_full = -(-length // size)
    blocks = BlockBytes(size * demand.per_token, size * window.bytes_per_token, window.num_blocks(options, context))
    taken = demand.weights + demand.states + demand.scratch.of(length)
    room = None if available is None else available - taken
    budget = cache_budget(options, blocks, num_full, room, kv_limit)
    if budget < blocks.of(num_full):
        num_blocks, num_windows = budget // max(blocks.everywhere, 1), 0
    else:
        spare = options.max_num_seqs if options.prefix_cache else 0
        num_blocks, num_windows = blocks.divide(budget, num_full, options.max_num_seqs, spare)
    cache = num_blocks * blocks.everywhere + num_windows * blocks.window
    reasons = [*context_reasons(length, context), *cache_reasons(options, blocks, budget, length)]
    if available is not None and taken + cache > available:
        reasons.append(memory_reason(options, context, demand, blocks, cache, available))
    num_at_once = num_blocks // num_full
    if num_windows:
        num_at_once = min(num_at_once, num_windows // min(blocks.most, num_full))
    notes = [] if reasons else sharing_notes(options, num_at_once, length)
    return MemoryPlan(length, num_blocks, tuple(notes), tuple(reasons), num_windows)


def context_reasons(length: int, context: int) -> list[str]:
    """A request longer than the checkpoint was made for."""
    if length <= context:
        return []
    return [
        f"max_model_len={length} is longer than the checkpoint's context of {context} tokens: lower --max-model-len"
    ]


def cache_reasons(options: SizedOptions, blocks: BlockBytes, budget: int, length: int) -> list[str]:
    """A cache that was said to be so small that not one request of full length fits."""
    one_request, held = blocks.of(-(-length // options.block_size)), blocks.longest(budget) * options.block_size
    if budget >= one_request:
        return []
    return [
        f"kv_cache_bytes={options.kv_cache_bytes} holds {held} tokens, fewer than one request of "
        f"max_model_len={length}: give {one_request} bytes or lower --max-model-len"
    ]


def memory_reason(
    options: SizedOptions, context: int, demand: Demand, blocks: BlockBytes, cache: int, available: int
) -> str:
    """Why a cache of so many bytes does not fit beside the rest, and what would."""
    length, size, scratch = options.max_model_len or context, options.block_size, demand.scratch
    weights = demand.weights + demand.states
    room = available - weights - scratch.of(length)
    a_block = replace(blocks, everywhere=blocks.everywhere + size * scratch.per_key)
    fitting = min(a_block.longest(available - weights - scratch.fixed) * size, context)
    advice = f"set --max-model-len {fitting} or lower" if fitting else "take a smaller checkpoint"
    if options.kv_cache_bytes is not None and room >= blocks.of(-(-length // size)):
        advice = f"set --kv-cache-bytes {room} or lower"
    elif not fitting and size > length:
        advice = "lower --block-size"
    elif not fitting and a_block.longest(available - demand.weights):
        advice = "lower --max-num-batched-tokens or --max-num-seqs"  # it is what a step computes in that does not fit
    return (
        f"weights, cache and working memory need {gib(weights + cache + scratch.of(length))} ({gib(weights)} + "
        f"{gib(cache)} + {gib(scratch.of(length))} for {length} tokens) of {gib(available)} available: {advice}"
    )


def sharing_notes(options: SizedOptions, num_at_once: int, length: int) -> list[str]:
    """That requests of full length must wait for one another's blocks."""
    if num_at_once >= options.max_num_seqs:
        return []
    return [
        f"the cache holds {num_at_once} requests of max_model_len={length} at once, not max_num_seqs="
        f"{options.max_num_seqs}; shorter ones share it"
    ]


def cache_budget(options: SizedOptions, blocks: BlockBytes, num_full: int, room: int | None, kv_limit: int) -> int:
    """Bytes that keys and values may take: what was said, or what max_num_seqs requests of num_full blocks take and
    what is kept of earlier ones' windows, at most kv_limit and what there is, at least one request."""
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    one_request, most = blocks.of(num_full), min(num_full, blocks.most)
    spare = min(options.max_num_seqs * most, options.max_num_seqs * (num_full - most)) if options.prefix_cache else 0
    wanted = options.max_num_seqs * one_request + spare * blocks.window
    limit = kv_limit if room is None else min(kv_limit, max(room, 0))
    return max(min(wanted, limit), one_request)


def keeps_prompt_ends(options: SizedOptions, spec: CacheSpec, capability: BackendCapability) -> bool:
    """Whether what the ends of prompts leave is kept, see `PromptEnds`."""
    has_states = bool(num_state_slots(options, spec)) and not spec.window_tokens()
    return has_states and options.prefix_cache and COPY in capability.ops


def prompt_end_bytes(
    options: SizedOptions, spec: CacheSpec, checkpoint: Checkpoint, capability: BackendCapability
) -> int:
    """Bytes of the logits that are kept of prompts' ends: a row of float32 for each of max_num_seqs."""
    if not keeps_prompt_ends(options, spec, capability):
        return 0
    rows = [checkpoint.tensors[name].shape[0] for name in TABLES if name in checkpoint.tensors]
    return 4 * options.max_num_seqs * max(rows, default=0)


def max_steps_in_flight(options: SizedOptions, spec: CacheSpec, capability: BackendCapability) -> int:
    """What the backend takes, unless it was switched off; one where states are kept: a state cannot be told apart from
    that of a token further, so it is copied before the next step begins."""
    return capability.max_steps_in_flight if options.overlap and not spec.bytes_per_sequence() else 1


def num_state_slots(options: SizedOptions, spec: CacheSpec) -> int:
    """One for each running request, and as many for snapshots where prefixes are found again."""
    return options.max_num_seqs * (2 if options.prefix_cache else 1) if spec.bytes_per_sequence() else 0


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
