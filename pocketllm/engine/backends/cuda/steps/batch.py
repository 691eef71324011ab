"""A step's batch on the device: one copy of all its numbers, and which sequences have one token or more."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch

TILE_QUERIES = 64
"""Tokens of one sequence that one program of the prefill attention takes."""


@dataclass(frozen=True)
class DeviceBatch:
    """The fields of `ForwardBatch` as int32 tensors; what a kernel's grid needs is known on the host too."""

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor | None
    """None: every token's."""
    single_seqs: Tensor
    """Sequences with one token in this step; where they are told apart, those of answers."""
    single_tokens: Tensor
    """Where that token is."""
    tile_seqs: Tensor
    """Tiles of queries of the other sequences: which, and from which of its tokens on."""
    tile_firsts: Tensor
    max_length: int
    """No sequence with one token is longer."""
    window_table: Tensor
    """As block_table and slot_mapping, of caches in windows; empty without one."""
    window_slots: Tensor
    state_slots: Tensor
    """Of each sequence, -1 of one that is not there; empty when the model has no states."""

    @property
    def is_single(self) -> bool:
        """Whether every sequence has one token. Numbers alone do not tell: there may be spare singles."""
        return not len(self.tile_seqs)

    def blocks(self, in_windows: bool) -> "DeviceBatch":
        """The same with the blocks of caches in windows where the others' are."""
        if not in_windows:
            return self
        return replace(self, block_table=self.window_table, slot_mapping=self.window_slots)


@dataclass(frozen=True)
class Sizes:
    """How long a batch's arrays are. A batch of larger sizes than its own has empty places after what is in it."""

    tokens: int
    seqs: int
    singles: int
    tiles: int
    rows: int
    table_width: int
    max_length: int
    has_windows: bool
    has_states: bool

    @property
    def of_arrays(self) -> list[int]:
        """Numbers of each array, in the order of `DeviceBatch`."""
        table = self.seqs * self.table_width
        tokens, singles, tiles = self.tokens, self.singles, self.tiles
        windows = [table, tokens] if self.has_windows else [0, 0]
        sizes = [tokens, tokens, self.seqs + 1, self.seqs, table, tokens, self.rows, singles, singles, tiles, tiles]
        return [*sizes, *windows, self.seqs if self.has_states else 0]


def are_single(batch: ForwardBatch) -> bool:
    """Whether every sequence is attended as one token, over splits of its keys: where they are told apart, those of
    answers alone."""
    return batch.is_single and (not len(batch.answers) or bool(batch.answers.all()))


def singles_of(batch: ForwardBatch, counts: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Of each sequence, whether it is attended so."""
    return batch.answers if len(batch.answers) else counts == 1


def tiles_of(
    counts: npt.NDArray[np.int32], singles: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Tiles of queries of the other sequences: which sequence, and from which of its tokens on."""
    numbers = np.where(singles, 0, -(-counts // TILE_QUERIES))
    seqs = np.repeat(np.arange(len(counts), dtype=np.int32), numbers)
    firsts = np.arange(len(seqs), dtype=np.int32) - np.repeat(np.cumsum(numbers) - numbers, numbers).astype(np.int32)
    return seqs, firsts * np.int32(TILE_QUERIES)


def sizes_of(batch: ForwardBatch) -> Sizes:
    """The sizes that a batch needs."""
    if are_single(batch):
        count, width, longest = batch.num_seqs, batch.block_table.shape[1], int(batch.seq_lens.max(initial=0))
        return Sizes(count, count, count, 0, len(batch.logit_rows), width, longest, *kinds_of(batch))
    counts = np.diff(batch.query_start_loc)
    singles = singles_of(batch, counts)
    has_windows, has_states = kinds_of(batch)
    return Sizes(
        tokens=batch.num_tokens,
        seqs=batch.num_seqs,
        singles=int(singles.sum()),
        tiles=len(tiles_of(counts, singles)[0]),
        rows=len(batch.logit_rows),
        table_width=batch.block_table.shape[1],
        max_length=int(batch.seq_lens[singles].max(initial=0)),
        has_windows=has_windows,
        has_states=has_states,
    )


def kinds_of(batch: ForwardBatch) -> tuple[bool, bool]:
    """Whether the model has caches in windows, and recurrent states."""
    return batch.window_table.size > 0, batch.state_slots.size > 0


def views_of(target: npt.NDArray[np.int32], sizes: Sizes) -> list[npt.NDArray[np.int32]]:
    """Its parts, one array after another, in the order of `DeviceBatch`."""
    return np.split(target, np.cumsum(sizes.of_arrays)[:-1])


def fill(target: npt.NDArray[np.int32], views: list[npt.NDArray[np.int32]], batch: ForwardBatch, sizes: Sizes) -> None:
    """Write everything that goes to the device. views: of the target.

    Empty places: tokens without a slot, sequences of length 0 without a state; spare tiles and singles are of the last
    sequence, which must be an empty one where there are any.
    """
    if are_single(batch):
        singles, single_tokens = batch.query_start_loc[:-1], batch.query_start_loc[:-1]
        tile_seqs = tile_firsts = singles[:0]
    else:
        counts = np.diff(batch.query_start_loc)
        is_one = singles_of(batch, counts)
        singles = np.flatnonzero(is_one).astype(np.int32)
        single_tokens = batch.query_start_loc[singles]
        tile_seqs, tile_firsts = tiles_of(counts, is_one)
    target.fill(0)
    ids, positions, starts, lengths, table, slots, rows, single_seqs, single_places, *rest = views
    tiles, firsts, window_table, window_slots, state_slots = rest
    starts.fill(batch.num_tokens)
    slots.fill(-1)
    window_slots.fill(-1)
    state_slots.fill(-1)
    single_seqs.fill(sizes.seqs - 1)
    tiles.fill(sizes.seqs - 1)
    for view, blocks in ((table, batch.block_table), (window_table, batch.window_table)):
        if view.size:
            view.reshape(sizes.seqs, sizes.table_width)[: len(blocks), : blocks.shape[1]] = blocks
    for view, values in (
        (ids, batch.input_ids), (positions, batch.positions), (starts, batch.query_start_loc),
        (lengths, batch.seq_lens), (slots, batch.slot_mapping), (single_seqs, singles), (single_places, single_tokens),
        (rows, batch.logit_rows[: sizes.rows]), (tiles, tile_seqs), (firsts, tile_firsts),
        (window_slots, batch.window_slots), (state_slots, batch.state_slots),
    ):  # fmt: skip
        view[: len(values)] = values


def named(whole: Tensor, sizes: Sizes, takes_all: bool = False) -> DeviceBatch:
    """Views of one tensor by the arrays' sizes; takes_all: every token's logits are wanted, in order."""
    ids, positions, starts, lengths, table, slots, rows, *rest = torch.split(whole, sizes.of_arrays)
    single_seqs, single_tokens, tile_seqs, tile_firsts, window_table, window_slots, state_slots = rest
    return DeviceBatch(
        input_ids=ids,
        positions=positions,
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table.view(sizes.seqs, sizes.table_width),
        slot_mapping=slots,
        logit_rows=None if takes_all else rows,
        single_seqs=single_seqs,
        single_tokens=single_tokens,
        tile_seqs=tile_seqs,
        tile_firsts=tile_firsts,
        max_length=sizes.max_length,
        window_table=window_table.view(-1, sizes.table_width),
        window_slots=window_slots,
        state_slots=state_slots,
    )


def to_device(batch: ForwardBatch, device: torch.device) -> DeviceBatch:
    """One copy, whatever the batch holds."""
    sizes = sizes_of(batch)
    whole = np.empty(sum(sizes.of_arrays), np.int32)
    fill(whole, views_of(whole, sizes), batch, sizes)
    return named(upload(whole, device), sizes)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array; from pinned memory, so that nothing waits for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()
