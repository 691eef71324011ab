"""Steps whose tokens have the same bits in any company: those of answers and those of prompts are run apart.

Each kind has one form of every product and of attention, however many rows there are: answers that of a few rows and of
splits of keys, prompts that of many rows and of tiles of queries, even where a piece of a prompt is one token.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.cuda.steps.batch import upload
from pocketllm.engine.backends.cuda.steps.graphs import Captured
from pocketllm.engine.backends.cuda.steps.widths import WIDTHS

Places = npt.NDArray[np.int64]


class Apart:
    """A captured forward that runs a step in parts, each of one kind, one after the other."""

    def __init__(self, captured: Captured, device: torch.device) -> None:
        self.drawer = captured.drawer
        self._captured = captured
        self._device = device

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Run a step; the result may be overwritten by the next."""
        return self._run(batch, self._captured)

    def eager(self, batch: ForwardBatch) -> Tensor:
        """The same step, one operation after another."""
        return self._run(batch, self._captured.eager)

    def _run(self, batch: ForwardBatch, forward: Callable[[ForwardBatch], Tensor]) -> Tensor:
        parts = list(parts_of(batch))
        if len(parts) == 1:
            return forward(batch)
        whole: Tensor | None = None
        for part, rows in parts:
            some = forward(part)
            if whole is None:
                whole = some.new_empty(len(batch.logit_rows), some.shape[1])
            whole[upload(rows, self._device)] = some
        assert whole is not None, "a step has tokens"
        return whole


def parts_of(batch: ForwardBatch) -> Iterator[tuple[ForwardBatch, Places]]:
    """Answers, as many at a time as the widest captured step has, then prompts; with the rows of the result of each."""
    assert len(batch.answers) == batch.num_seqs, "a step must tell which tokens are of answers"
    answers, prompts = np.flatnonzero(batch.answers), np.flatnonzero(~batch.answers)
    for first in range(0, len(answers), WIDTHS[-1]):
        part, rows = part_of(batch, answers[first : first + WIDTHS[-1]])
        assert part.num_tokens == part.num_seqs == len(rows), "of an answer one token is run, for its logits"
        yield part, rows
    if len(prompts):
        yield part_of(batch, prompts)


def part_of(batch: ForwardBatch, seqs: Places) -> tuple[ForwardBatch, Places]:
    """Some sequences of a step, and which rows of its result are theirs."""
    if len(seqs) == batch.num_seqs:
        return batch, np.arange(len(batch.logit_rows))
    counts = np.diff(batch.query_start_loc)
    owner = np.repeat(np.arange(batch.num_seqs), counts)
    is_own = np.isin(owner, seqs)
    tokens, rows = np.flatnonzero(is_own), np.flatnonzero(is_own[batch.logit_rows])
    place = np.cumsum(is_own) - 1  # of a token of theirs, among those
    has_windows, has_states = batch.window_slots.size > 0, batch.state_slots.size > 0
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        query_start_loc=np.concatenate([[0], np.cumsum(counts[seqs])]).astype(np.int32),
        seq_lens=batch.seq_lens[seqs],
        block_table=batch.block_table[seqs],
        slot_mapping=batch.slot_mapping[tokens],
        logit_rows=place[batch.logit_rows[rows]].astype(np.int32),
        state_slots=batch.state_slots[seqs] if has_states else batch.state_slots,
        window_table=batch.window_table[seqs] if has_windows else batch.window_table,
        window_slots=batch.window_slots[tokens] if has_windows else batch.window_slots,
        answers=batch.answers[seqs],
    ), rows
