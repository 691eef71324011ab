"""Runs one scheduled step through the model, and has the next token of each request drawn from its logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.drawing import Draw, Drawer, PendingDraws
from pocketllm.engine.backends.api.ops import Tensor
from pocketllm.engine.lifecycle.request import Request, RequestState
from pocketllm.engine.lifecycle.sampling.logprobs import TokenLogprobs, token_logprobs
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.lifecycle.scheduler import Schedule
from pocketllm.engine.lifecycle.steps import batch

LogitsRow = npt.NDArray[np.float32]
"""[vocab]"""
Copier = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], None]
"""Copies each source to its target, one after another."""
T = TypeVar("T")
R = TypeVar("R")
Choice = tuple[int, TokenLogprobs | None] | Exception
"""A request's next token, or why there is none."""

LOGIT_ROWS_AT_ONCE = 128
"""Rows whose logits are held together: with a vocabulary of 256k tokens 128 rows are 128 MiB."""


@dataclass(frozen=True)
class Launched:
    """A step that is being computed; its hidden states and logits last until the next one is launched."""

    schedule: Schedule
    owners: Sequence[tuple[Request, int]]
    """Of each row of hidden states: whose, and of which of its tokens."""
    rows: Mapping[Request, int | None]
    """Requests that catch up with the step, and their row; None where the logits are known already."""
    hidden: Tensor | None
    logits: Tensor | None
    """Of all rows, unless they are too many to be held together."""


@dataclass(frozen=True)
class Draws:
    """Tokens of a step that are being drawn."""

    logits: Mapping[Request, LogitsRow] = field(default_factory=dict)
    """Where the host has them."""
    chosen: Mapping[Request, Choice] = field(default_factory=dict)
    """What the host has drawn itself."""
    pending: PendingDraws | None = None
    rows: Mapping[Request, tuple[int, Sampler]] = field(default_factory=dict)
    """Whose tokens are pending, from which row of logits, in their order."""

    @property
    def input_ids(self) -> Mapping[Request, int]:
        """What a step that is launched before the tokens have come takes for them (see `Drawer`)."""
        # of a request that has got no token but an error, the next step is not looked at
        known = {one: 0 if isinstance(choice, Exception) else choice[0] for one, choice in self.chosen.items()}
        return {**known, **{request: -1 - row for request, (row, _) in self.rows.items()}}

    def wait(self) -> Mapping[Request, Choice]:
        """All tokens. Raises what the device failed with."""
        if self.pending is None:
            return self.chosen
        drawn = zip(self.rows.items(), self.pending.wait(), strict=True)
        return {**self.chosen, **{request: attempt(sampler.drawn, token) for (request, (_, sampler)), token in drawn}}


class Runner:
    """A model's forward pass over its cache, and its head; knows nothing of why a request is run.

    forward: one flat batch → hidden states of its `logit_rows`, as the backend captured it; logits: the model's own, as
    numpy; take: the backend's `Ops.take`, for cutting many rows of hidden states into slices; copy_states and
    copy_blocks: of a model with recurrent states, from slots to slots and from cache blocks to cache blocks;
    answers_apart: see `Limits`.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        logits: Callable[[Tensor], Any],
        block_size: int,
        take: Callable[[Tensor, npt.NDArray[np.int32]], Tensor],
        copy_states: Copier | None = None,
        copy_blocks: Copier | None = None,
        answers_apart: bool = False,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._block_size = block_size
        self._take = take
        self._copy_states = copy_states
        self._copy_blocks = copy_blocks
        self._answers_apart = answers_apart
        self._drawer: Drawer | None = None
        self._keeps_ends = False
        self._to_numpy: Callable[[Any], Any] = np.asarray

    def draw_by(
        self,
        drawer: Drawer,
        logits: Callable[[Tensor], Tensor],
        to_numpy: Callable[[Tensor], npt.NDArray[np.float32]],
        keeps_ends: bool = False,
    ) -> None:
        """Have tokens drawn where their logits are: `logits` leaves them there, and `to_numpy` brings them.

        What cannot be drawn there (`Sampler.is_drawable`, and more rows than are held together) the host draws, row by
        row, from logits that it then waits for. keeps_ends: so it does for each request's first token, as it keeps the
        logits at ends of prompts.
        """
        self._drawer, self._logits, self._to_numpy, self._keeps_ends = drawer, logits, to_numpy, keeps_ends

    def launch(self, schedule: Schedule, pending_ids: Mapping[Request, int]) -> Launched:
        """Start to compute a step. pending_ids: `Draws.input_ids` of the one before, whose tokens may not have come."""
        for copies, copier in ((schedule.state_copies, self._copy_states), (schedule.block_copies, self._copy_blocks)):
            if copies:
                assert copier is not None
                sources, targets = np.array(copies, np.int32).T
                copier(sources, targets)
        computed = schedule
        if schedule.ends:
            counts = {request: count for request, count in schedule.num_tokens.items() if count}
            computed = replace(schedule, num_tokens=counts)
            if not counts:
                return Launched(schedule, (), dict.fromkeys(schedule.ends), None, None)
        hidden = self._forward(batch.build(computed, self._block_size, pending_ids, self._answers_apart))
        owners = batch.owners(computed)
        last = {request: row for row, (request, _) in enumerate(owners) if request in schedule.ready}
        logits = self._logits(hidden) if 0 < len(owners) <= LOGIT_ROWS_AT_ONCE else None
        return Launched(schedule, owners, {**dict.fromkeys(schedule.ends), **last}, hidden, logits)

    def draw(self, launched: Launched, samplers: Mapping[Request, Sampler]) -> Draws:
        """Start to draw the next tokens of some requests that catch up with a step, in its order.

        Rows of requests that want prompt logits go into `request.prompt_logits`, and what others want to know of their
        prompt goes into `request.prompt_logprobs`.
        """
        draws, rows, chosen = list[Draw](), dict[Request, tuple[int, Sampler]](), dict[Request, Choice]()
        for request, sampler in samplers.items():
            row = launched.rows[request]
            if self._drawer is None or launched.logits is None or row is None or not sampler.is_drawable:
                continue
            if self._keeps_ends and not request.output_token_ids:
                continue
            if self._answers_apart and sampler.params.logprobs is not None:
                continue  # in what order a device sums for its reports goes by how many there are
            draw = attempt(sampler.draw, row)
            if isinstance(draw, Exception):
                chosen[request] = draw
            else:
                draws.append(draw)
                rows[request] = row, sampler
        pending = self._drawer.draw(launched.logits, draws) if self._drawer is not None and draws else None
        others = [request for request in samplers if request not in rows and request not in chosen]
        logits = dict(launched.schedule.ends)
        if others or any(request.is_scored for request, _ in launched.owners):
            logits |= self._on_host(launched)
        chosen |= {request: attempt(samplers[request].choose, logits[request]) for request in others}
        return Draws(logits, chosen, pending, rows)

    def _on_host(self, launched: Launched) -> dict[Request, LogitsRow]:
        """Bring the logits; those of scored rows are kept, those of requests that have caught up are returned."""
        found: dict[Request, LogitsRow] = {}
        owners = launched.owners
        for first in range(0, len(owners), LOGIT_ROWS_AT_ONCE):
            some = owners[first : first + LOGIT_ROWS_AT_ONCE]
            rows = np.arange(first, first + len(some), dtype=np.int32)
            logits = launched.logits
            if logits is None:
                logits = self._logits(self._take(launched.hidden, rows))
            for row, ((request, position), row_logits) in enumerate(zip(some, self._to_numpy(logits), strict=True)):
                if request.state is RequestState.FINISHED:
                    continue
                if request.wants_prompt_logits:
                    self._keep(request, position, row_logits)
                    continue
                if request.is_scored:
                    report_next(request, position, row_logits)
                if launched.rows.get(request) == first + row:
                    found[request] = row_logits
        return found

    def _keep(self, request: Request, position: int, logits: LogitsRow) -> None:
        if request.prompt_logits is None:
            request.prompt_logits = np.empty((len(request.prompt_token_ids), len(logits)), np.float32)
        request.prompt_logits[position] = logits


def attempt(call: Callable[[T], R], argument: T) -> R | Exception:
    """What a call returns, or raises."""
    try:
        return call(argument)
    except Exception as error:
        return error


def report_next(request: Request, position: int, logits: LogitsRow) -> None:
    """Add to `prompt_logprobs` what the row at `position` says of the prompt token after it."""
    known, prompt = request.prompt_logprobs, request.prompt_token_ids
    if not known:
        known.append(None)
    # a request that was preempted halfway comes by its first rows twice
    if position + 1 == len(known) and position + 1 < len(prompt):
        count = request.params.prompt_logprobs
        assert count is not None, request.request_id
        known.append(token_logprobs(logits, prompt[position + 1], count, with_rank=True))
