"""Runs one scheduled step through the model and hands each request its logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Tensor
from pocketllm.engine.lifecycle import batch
from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.logprobs import token_logprobs
from pocketllm.engine.lifecycle.scheduler import Schedule

LogitsRow = npt.NDArray[np.float32]
"""[vocab]"""
Copier = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], None]
"""Copies each source to its target, one after another."""

LOGIT_ROWS_AT_ONCE = 128
"""Rows whose logits are held together: with a vocabulary of 256k tokens 128 rows are 128 MiB."""


class Runner:
    """A model's forward pass over its cache, and its head; knows nothing of why a request is run.

    forward: one flat batch → hidden states of its `logit_rows`, as the backend captured it; logits: the model's own;
    take: the backend's `Ops.take`, for cutting many rows of hidden states into slices; copy_states and copy_blocks: of
    a model with recurrent states, from slots to slots and from cache blocks to cache blocks.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        logits: Callable[[Tensor], Any],
        block_size: int,
        take: Callable[[Tensor, npt.NDArray[np.int32]], Tensor],
        copy_states: Copier | None = None,
        copy_blocks: Copier | None = None,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._block_size = block_size
        self._take = take
        self._copy_states = copy_states
        self._copy_blocks = copy_blocks

    def run(self, schedule: Schedule) -> dict[Request, LogitsRow]:
        """Compute one step; returns the logits of each request that catches up with it, in the schedule's order.

        Rows of requests that want prompt logits go into `request.prompt_logits` instead, and what others want to know
        of their prompt goes into `request.prompt_logprobs` as well.
        """
        for copies, copier in ((schedule.state_copies, self._copy_states), (schedule.block_copies, self._copy_blocks)):
            if copies:
                assert copier is not None
                sources, targets = np.array(copies, np.int32).T
                copier(sources, targets)
        if schedule.ends:
            computed = {request: count for request, count in schedule.num_tokens.items() if count}
            known = dict(schedule.ends)
            return {**known, **self._compute(replace(schedule, num_tokens=computed))} if computed else known
        return self._compute(schedule)

    def _compute(self, schedule: Schedule) -> dict[Request, LogitsRow]:
        forward_batch = batch.build(schedule, self._block_size)
        hidden = self._forward(forward_batch)
        owners = [
            (request, request.num_computed_tokens + count - wanted + row)
            for request, count in schedule.num_tokens.items()
            for wanted in [batch.num_logit_rows(request, count)]
            for row in range(wanted)
        ]
        result: dict[Request, LogitsRow] = {}
        for first in range(0, len(owners), LOGIT_ROWS_AT_ONCE):
            some = owners[first : first + LOGIT_ROWS_AT_ONCE]
            rows = np.arange(first, first + len(some), dtype=np.int32)
            logits = self._logits(hidden if len(some) == len(owners) else self._take(hidden, rows))
            for (request, position), row_logits in zip(some, logits, strict=True):
                if request.wants_prompt_logits:
                    self._keep(request, position, row_logits)
                    continue
                if request.is_scored:
                    report_next(request, position, row_logits)
                if position == request.num_tokens - 1:
                    result[request] = row_logits
        return result

    def _keep(self, request: Request, position: int, logits: LogitsRow) -> None:
        if request.prompt_logits is None:
            request.prompt_logits = np.empty((len(request.prompt_token_ids), len(logits)), np.float32)
        request.prompt_logits[position] = logits


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
