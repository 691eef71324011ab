"""Who computes how many tokens in the next step; pure: no tensor, no clock, no thread.

A step is a map *request → number of tokens* without a phase flag: prefill, decode, a chunk of a long prompt and the
recomputation of a preempted request are all `num_computed_tokens` catching up with `num_tokens`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pocketllm.engine.lifecycle.kv.block_groups import BlockGroup, WindowGroup
from pocketllm.engine.lifecycle.kv.block_pool import blocks_for
from pocketllm.engine.lifecycle.kv.prefix_cache import PrefixCache
from pocketllm.engine.lifecycle.kv.prompt_ends import PromptEnds
from pocketllm.engine.lifecycle.kv.state_slots import Copy, StateSlots
from pocketllm.engine.lifecycle.request import Request, RequestState
from pocketllm.engine.plan import Limits
from pocketllm.errors import ContextLengthError, RequestError

MAX_PROMPT_LOGITS_BYTES = 2 << 30


@dataclass(frozen=True)
class Schedule:
    """One step: how many tokens each request computes, oldest request first, and who lost its blocks for it."""

    num_tokens: Mapping[Request, int]
    starts: Mapping[Request, int] = field(default_factory=dict)
    """Which of its tokens each begins with."""
    ready: frozenset[Request] = frozenset()
    """Those that catch up with this step: its logits tell their next token."""
    preempted: tuple[Request, ...] = ()
    state_copies: tuple[Copy, ...] = ()
    """Copies of recurrent states to make before the step, one after another."""
    block_copies: tuple[Copy, ...] = ()
    """The same of cache blocks."""
    ends: Mapping[Request, Any] = field(default_factory=dict)
    """Logits of requests that compute 0 tokens, because an equal prompt was computed before."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens.values())


class Scheduler:
    """Running requests first, then waiting ones in order of arrival; no one is overtaken.

    The oldest running request always gets its blocks (younger ones are preempted for it) and every accepted request
    fits the pool alone, so that something advances in every step. cache_seed: see PrefixCache.
    """

    def __init__(self, limits: Limits, vocab_size: int, cache_seed: bytes = b"") -> None:
        self.limits = limits
        self.vocab_size = vocab_size
        everywhere = BlockGroup(limits.num_blocks, limits)
        self.pool = everywhere.pool
        self.windows = WindowGroup(limits) if limits.window else None
        self._groups = [everywhere] if self.windows is None else [everywhere, self.windows]
        self.states = StateSlots(limits.num_state_slots) if limits.num_state_slots else None
        self.ends: PromptEnds | None = None
        if self.states is not None and limits.keeps_prompt_ends:
            self.ends = PromptEnds(self.pool, self.states, limits.block_size, most=limits.max_num_seqs)
        self.prefix_cache: PrefixCache | None = None
        if limits.prefix_cache:
            self.prefix_cache = PrefixCache(
                self.pool, limits.block_size, cache_seed, self.states, self.ends, self.windows, limits.answers_apart
            )
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- admission -------------------------------------------------------------------------------------------------
    def check(self, request: Request) -> None:
        """Accept a request for `add`, or raise RequestError (ContextLengthError with counts) saying why never."""
        check_prompt(request.prompt_token_ids, self.vocab_size)
        check_token_ids(request.params.stop_token_ids, self.vocab_size, "stop_token_ids")
        check_token_ids([token_id for token_id, _ in request.params.logit_bias], self.vocab_size, "logit_bias")
        request.max_output_tokens = self._max_output_tokens(request)
        needed = blocks_for(request.max_computed_tokens, self.limits.block_size)
        if needed > self.limits.num_blocks:
            capacity = self.limits.num_blocks * self.limits.block_size
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and the answer may have "
                f"{request.max_output_tokens}, but the cache holds {capacity}: shorten either one, or raise "
                "kv_cache_bytes",
                param="prompt",
            )

    def _max_output_tokens(self, request: Request) -> int:
        num_prompt, context = len(request.prompt_token_ids), self.limits.max_model_len
        if request.wants_prompt_logits:
            self._check_scoring(num_prompt)
            return 0
        least = 0 if request.params.max_tokens == 0 else 1
        if num_prompt + least > context:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and {'with an answer ' * least}it must fit "
                f"max_model_len={context}: shorten it by {num_prompt - context + least} tokens or more",
                param="prompt",
            )
        if request.params.max_tokens is None:
            return context - num_prompt
        if num_prompt + request.params.max_tokens > context:
            raise ContextLengthError(
                f"the prompt's {num_prompt} tokens and max_tokens={request.params.max_tokens} make "
                f"{num_prompt + request.params.max_tokens}, more than max_model_len={context}: "
                f"shorten the prompt, or lower max_tokens to {context - num_prompt}",
                param="max_tokens",
            )
        return request.params.max_tokens

    def _check_scoring(self, num_prompt: int) -> None:
        if num_prompt > self.limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, more than max_model_len={self.limits.max_model_len}",
                param="prompt",
            )
        most = MAX_PROMPT_LOGITS_BYTES // (4 * self.vocab_size)
        if num_prompt > most:
            raise RequestError(
                f"logits of {num_prompt} prompt tokens would take more than {MAX_PROMPT_LOGITS_BYTES >> 30} GiB: "
                f"score at most {most} tokens at once",
                param="prompt",
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` accepted."""
        assert request.state is RequestState.WAITING, request.request_id
        self.waiting.append(request)

    # -- one step --------------------------------------------------------------------------------------------------
    def schedule(self) -> Schedule:
        """Decide the next step and give its requests their blocks; until `update`, it is in flight.

        Empty when there is no work, and while a step is in flight also when there is none yet, or when somebody would
        be preempted: whoever ends with that step may leave the blocks that are missing.
        """
        if self._is_short_of_blocks():
            return Schedule({})
        tokens: dict[Request, int] = {}
        preempted = self._schedule_running(tokens)
        ends: dict[Request, Any] = {}
        if not preempted:  # or whoever lost its blocks would be back at once, through the prefix cache
            self._admit(tokens, ends)
        starts = {request: request.num_started_tokens for request in tokens}
        return Schedule(
            tokens,
            starts,
            self._start(tokens),
            tuple(preempted),
            state_copies=self.states.take_copies() if self.states is not None else (),
            block_copies=self.ends.take_copies() if self.ends is not None else (),
            ends=ends,
        )

    def _is_short_of_blocks(self) -> bool:
        """Whether a step is in flight and the next one might have to preempt somebody."""
        if not any(request.num_in_flight_tokens for request in self.running):
            return False
        chunk = self.limits.prefill_chunk
        most = len(self.running) * (blocks_for(chunk, self.limits.block_size) + 1)
        if all(most <= group.pool.num_free for group in self._groups):
            return False
        ends = [(one, min(one.num_computable_tokens, one.num_started_tokens + chunk)) for one in self.running]
        return any(sum(group.num_missing(*end) for end in ends) > group.pool.num_free for group in self._groups)

    def _start(self, tokens: Mapping[Request, int]) -> frozenset[Request]:
        """Book a step as being in flight; returns the requests that catch up with it."""
        ready = []
        for request, count in tokens.items():
            request.num_in_flight_tokens += count
            if request.num_started_tokens == request.num_tokens + request.num_pending_tokens:
                ready.append(request)
                request.num_pending_tokens += request.max_output_tokens > 0
        return frozenset(ready)

    def _schedule_running(self, tokens: dict[Request, int]) -> list[Request]:
        preempted: list[Request] = []
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(self.running):
            request = self.running[index]
            # what those after it need at least is not its to take
            count = self._num_next(request, budget - (len(self.running) - index - 1))
            if not count:  # its last token is on its way
                index += 1
                continue
            end = request.num_started_tokens + count
            while not self._has_room(request, end) and self.running[-1] is not request:
                preempted.append(self._preempt_youngest())
            if not self._has_room(request, end):
                preempted.append(self._preempt_youngest())
                break
            self._take_blocks(request, end)
            tokens[request] = count
            budget -= count
            index += 1
        return preempted

    def _preempt_youngest(self) -> Request:
        """Send the youngest running request back to the head of the queue; it is recomputed, but for cached tokens."""
        request = self.running[-1]
        assert not request.num_in_flight_tokens, f"{request.request_id} is in flight"
        self.running.pop()
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.move_to(RequestState.WAITING)
        self.waiting.appendleft(request)
        return request

    def _admit(self, tokens: dict[Request, int], ends: dict[Request, Any]) -> None:
        budget = self.limits.max_num_batched_tokens - sum(tokens.values())
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if request.must_wait:
                return
            request.score_alone()
            end = None if self.prefix_cache is None else self.prefix_cache.take_end(request)
            if end is None:
                self._take_cached(request)
            if (end is None and self._is_better_later(request)) or not self._fits(request):
                self._release(request)
                return  # the head of the line waits, and nobody passes it
            self.waiting.popleft()
            self._count_cached(request)
            count = 0 if end is not None else self._num_next(request, budget)
            if end is not None:
                ends[request] = end[1]
            if self.states is not None:
                known = request.block_keys[: len(request.block_ids)][-1:] if end is None else [end[0]]
                self.states.open(request, known[0] if known else None)
            self._take_blocks(request, request.num_computed_tokens + count)
            request.move_to(RequestState.RUNNING)
            self.running.append(request)
            tokens[request] = count
            budget -= count

    def _num_next(self, request: Request, budget: int) -> int:
        """How many of a request's tokens the step computes: one or more, as long as there are any."""
        done = request.num_started_tokens
        count = min(request.num_computable_tokens - done, self.limits.prefill_chunk, budget)
        return count if self.prefix_cache is None else self.prefix_cache.step_end(request, done + count) - done

    def _take_cached(self, request: Request) -> None:
        if self.prefix_cache is not None:
            request.block_ids = self.prefix_cache.match(request)
            self.pool.share(request.block_ids)
            if self.windows is not None:
                self.windows.resume(request, len(request.block_ids))
            request.num_kept_blocks = len(request.block_ids)
            request.num_computed_tokens = len(request.block_ids) * self.limits.block_size

    def _is_better_later(self, request: Request) -> bool:
        cache = self.prefix_cache
        return cache is not None and cache.is_worth_waiting(request, self.running)

    def _count_cached(self, request: Request) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.count(request, request.num_computed_tokens)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens

    def _fits(self, request: Request) -> bool:
        """Whether the pool can take one more: what is known to be needed, and `reserve` of what may be."""
        if not self.running:
            return True  # alone it fits, `check` saw to that
        return all(group.can_admit((*self.running, request)) for group in self._groups)

    # -- after the step ----------------------------------------------------------------------------------------------
    def update(self, schedule: Schedule) -> list[Request]:
        """Book a step that was computed; returns the requests that have caught up, in the step's order.

        What has ended since it was scheduled is passed over.
        """
        caught_up = []
        for request, count in schedule.num_tokens.items():
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens += count
            request.num_in_flight_tokens -= count
            assert request.num_computed_tokens <= request.num_tokens, request.request_id
            if self.prefix_cache is not None:
                self.prefix_cache.keep(request)
            if self.windows is not None:
                self.windows.give_back(request)
            if request in schedule.ready:
                request.num_pending_tokens -= request.max_output_tokens > 0
                caught_up.append(request)
        return caught_up

    def keep_end(self, request: Request, logits: Any) -> None:
        """Keep what a request that has caught up with its prompt leaves, before it draws from these logits: [vocab]."""
        if self.prefix_cache is not None:
            self.prefix_cache.keep_end(request, logits)

    def append(self, request: Request, token_id: int) -> None:
        """Add a request's next token."""
        assert len(request.output_token_ids) < request.max_output_tokens, request.request_id
        request.output_token_ids.append(token_id)

    def finish(self, request: Request, is_sound: bool = True) -> None:
        """End a request, wherever it stands, and free its blocks; what is not sound is not found again."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if not is_sound:
            self.pool.forget(request.block_ids)
            if self.windows is not None:
                self.windows.forget(request)
            if self.states is not None:
                self.states.pool.forget_all()  # copies may not have been made
            if self.ends is not None:
                self.ends.forget_all()
        self._release(request)
        request.move_to(RequestState.FINISHED)

    def _release(self, request: Request) -> None:
        for group in self._groups:
            group.release(request)
        if self.states is not None:
            self.states.close(request)
        request.num_kept_blocks = request.num_computed_tokens = 0
        request.num_in_flight_tokens = request.num_pending_tokens = 0

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        return all(group.has_room(request, num_tokens) for group in self._groups)

    def _take_blocks(self, request: Request, num_tokens: int) -> None:
        for group in self._groups:
            group.take(request, num_tokens)


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless these are one or more ids of the vocabulary."""
    if not len(token_ids):
        raise RequestError("the prompt is empty: give it at least one token", param="prompt", code="empty_prompt")
    check_token_ids(token_ids, vocab_size, "prompt")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError naming `param` for the first that is no id of the vocabulary."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{param}: token id {token_id!r} is not an integer", param=param)
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=param
            )
