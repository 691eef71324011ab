"""A request, its states and its events; pure.

WAITING ──schedule──► RUNNING ──stop · length · cancelled · error──► FINISHED
   ▲                     │
   └──── out of blocks ──┘   (recomputed from the start)
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


NEXT_STATES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """The one terminal event's cause."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass
class RequestTimes:
    """`time.perf_counter()` stamps in seconds; None until it happened."""

    submitted_s: float = field(default_factory=time.perf_counter)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


@dataclass(eq=False)
class Request:
    """One sequence to be continued; the scheduler alone changes it.

    `num_computed_tokens` counts tokens whose keys and values are in the cache; the request has caught up, and gets a
    new token, when it reaches `num_tokens`. A request that `wants_prompt_logits` is scored and not continued: it
    finishes, without a token of its own, when its prompt is computed; so does one with `params.max_tokens` 0.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    wants_prompt_logits: bool = False
    cache_salt: str | None = None
    """Only requests with the same salt share cached blocks; None is one too."""
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    """Tokens after those that steps in flight compute."""
    num_pending_tokens: int = 0
    """Tokens that steps in flight draw; they come after `output_token_ids`."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at its first admission."""
    num_preemptions: int = 0
    max_output_tokens: int = 0
    """`params.max_tokens`, or what the context leaves; set when the request is accepted."""
    block_ids: list[int] = field(default_factory=list)
    window_block_ids: list[int] = field(default_factory=list)
    """Blocks of layers that see a window, from number `num_gone_blocks` on; empty of a model without any."""
    num_gone_blocks: int = 0
    """First blocks of those layers that no token to come sees, and that were given back."""
    block_keys: list[bytes] = field(default_factory=list)
    """Prefix cache keys of its first full blocks, as far as they were asked for."""
    num_kept_blocks: int = 0
    """Blocks that the prefix cache knows of, from the first."""
    num_known_tokens: int = 0
    """First tokens whose blocks were found at its admission, more than it has a state for."""
    state_slot: int | None = None
    """Where its recurrent state is kept while it runs, of a model that has one."""
    answer_key: bytes | None = None
    """Of the latest snapshot of its state that holds tokens of its answer."""
    times: RequestTimes = field(default_factory=RequestTimes)
    prompt_logits: npt.NDArray[np.float32] | None = None
    """[prompt tokens, vocab], filled step by step when wanted."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One for each prompt token, the first None, when `params.prompt_logprobs` asks for them; filled step by step."""
    scored_by: "Request | None" = None
    """Submitted earlier, with the same prompt: its `prompt_logprobs` are this one's too, which begins after them."""
    seed: int = field(init=False)
    """`params.seed`, or a fresh one."""

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        if self.scored_by is not None:
            self.prompt_logprobs = self.scored_by.prompt_logprobs

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_started_tokens(self) -> int:
        """Computed, or being computed."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_computable_tokens(self) -> int:
        """Tokens that are there or on their way, but for an answer's last, which nothing follows."""
        return min(self.num_tokens + self.num_pending_tokens, self.max_computed_tokens)

    @property
    def max_computed_tokens(self) -> int:
        """Tokens that it computes at most, with an answer of `max_output_tokens`."""
        return len(self.prompt_token_ids) + max(self.max_output_tokens - 1, 0)

    @property
    def is_scored(self) -> bool:
        """Whether logits of every prompt token are still wanted, so that none may come from the prefix cache."""
        is_wanted = self.params.prompt_logprobs is not None and self.scored_by is None
        return self.wants_prompt_logits or (is_wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids))

    @property
    def must_wait(self) -> bool:
        """Whether another request has yet to compute the log-probabilities that are this one's too."""
        other = self.scored_by
        return other is not None and other.is_scored and other.state is not RequestState.FINISHED

    def score_alone(self) -> None:
        """Compute its own log-probabilities where the request that should have ended before it had them all."""
        if self.scored_by is not None and self.scored_by.is_scored:
            self.scored_by, self.prompt_logprobs = None, []

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        split = len(self.prompt_token_ids)
        head = list(self.prompt_token_ids[start : min(stop, split)])
        return head + self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]

    def move_to(self, state: RequestState) -> None:
        """Change state; an impossible change is a bug of ours."""
        assert state in NEXT_STATES[self.state], (self.request_id, self.state, state)
        self.state = state


@dataclass(frozen=True)
class TokenEvent:
    """One more token. `text` may be empty while half a character or half a stop string is held back."""

    request_id: str
    token_id: int
    text: str
    logprobs: TokenLogprobs | None
    time_s: float


@dataclass(frozen=True)
class FinishEvent:
    """The one terminal event of a request. `text` is what was held back until now."""

    request_id: str
    reason: FinishReason
    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    times: RequestTimes
    seed: int
    error: str | None = None
    """One sentence, when `reason` is ERROR; without paths of this machine."""
    is_unanswerable: bool = False
    """Whether the error lies in what was asked: nothing could obey its grammar any more."""
    stop_string: str | None = None
    """The stop string that ended the request, when one did."""
    prompt_logits: npt.NDArray[np.float32] | None = None
    """[prompt tokens, vocab], for a request that wanted them and was not cut short."""


Event = TokenEvent | FinishEvent
