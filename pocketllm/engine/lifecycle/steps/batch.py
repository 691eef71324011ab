"""From a schedule to the one flat batch that a model runs; numpy only, made anew each step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.scheduler import Schedule


def build(
    schedule: Schedule, block_size: int, pending_ids: Mapping[Request, int], tells_answers: bool = False
) -> ForwardBatch:
    """Gather the tokens, positions and cache places of one step; requests stay in the schedule's order.

    pending_ids: what stands for a request's next token while it is on its way; tells_answers: whether the backend is to
    know which tokens are of answers.
    """
    is_single = schedule.total_tokens == len(schedule.num_tokens)
    batch = (build_singles if is_single else build_ragged)(schedule, block_size, pending_ids)
    if not tells_answers:
        return batch
    answers = [schedule.starts[request] >= len(request.prompt_token_ids) for request in schedule.num_tokens]
    return replace(batch, answers=np.array(answers, np.bool_))


def build_ragged(schedule: Schedule, block_size: int, pending_ids: Mapping[Request, int]) -> ForwardBatch:
    """`build`, whatever each request computes."""
    requests = list(schedule.num_tokens)
    counts = np.fromiter(schedule.num_tokens.values(), np.int32, len(requests))
    starts = np.fromiter((schedule.starts[request] for request in requests), np.int32, len(requests))
    query_start_loc = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    input_ids = np.fromiter(
        (
            token_id
            for request, count in schedule.num_tokens.items()
            for token_id in token_ids(request, schedule.starts[request], count, pending_ids)
        ),
        np.int32,
        query_start_loc[-1],
    )
    rows = np.repeat(np.arange(len(requests)), counts)
    positions = np.arange(len(input_ids), dtype=np.int32) - query_start_loc[rows] + starts[rows]
    places, offsets = (rows, positions // block_size), positions % block_size
    table = block_table(requests)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=starts + counts,
        block_table=table,
        slot_mapping=table[places].astype(np.int64) * block_size + offsets,
        logit_rows=logit_rows(schedule, query_start_loc),
        state_slots=np.array([slot for slot in (r.state_slot for r in requests) if slot is not None], np.int32),
        **in_windows(requests, places, offsets, block_size),
    )


def build_singles(schedule: Schedule, block_size: int, pending_ids: Mapping[Request, int]) -> ForwardBatch:
    """`build` of one token a request, as most steps are: on small arrays an operation of numpy costs what ten requests
    do in a list."""
    requests = list(schedule.num_tokens)
    starts = [schedule.starts[request] for request in requests]
    ids = [token_ids(request, start, 1, pending_ids)[0] for request, start in zip(requests, starts, strict=True)]
    slots = [
        request.block_ids[start // block_size] * block_size + start % block_size
        for request, start in zip(requests, starts, strict=True)
    ]
    positions = np.array(starts, np.int32)
    return ForwardBatch(
        input_ids=np.array(ids, np.int32),
        positions=positions,
        query_start_loc=np.arange(len(requests) + 1, dtype=np.int32),
        seq_lens=positions + np.int32(1),
        block_table=block_table(requests),
        slot_mapping=np.array(slots, np.int64),
        logit_rows=np.array([row for row, one in enumerate(requests) if num_logit_rows(schedule, one)], np.int32),
        state_slots=np.array([slot for slot in (r.state_slot for r in requests) if slot is not None], np.int32),
        **in_windows(requests, (np.arange(len(requests)), positions // block_size), positions % block_size, block_size),
    )


def block_table(requests: list[Request]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """[requests, most blocks] the cache blocks of each request; -1 where it has none."""
    width = max(len(request.block_ids) for request in requests)
    return np.array([request.block_ids + [-1] * (width - len(request.block_ids)) for request in requests], np.int32)


def in_windows(
    requests: list[Request], places: tuple[Any, Any], offsets: Any, block_size: int
) -> dict[str, np.ndarray[Any, Any]]:
    """A batch's window_table and window_slots; nothing of a model without layers that see a window.

    places, offsets: of each token, its row and block in the table, and where in that block. A request's first block
    stands in place of those before it, too.
    """
    if not requests[0].window_block_ids:
        return {}
    table = np.full((len(requests), max(len(request.block_ids) for request in requests)), -1, np.int32)
    for row, request in enumerate(requests):
        first, ids = request.num_gone_blocks, request.window_block_ids
        table[row, :first] = ids[0]
        table[row, first : first + len(ids)] = ids
    return {"window_table": table, "window_slots": table[places].astype(np.int64) * block_size + offsets}


def token_ids(request: Request, start: int, count: int, pending_ids: Mapping[Request, int]) -> list[int]:
    """`count` of a request's tokens, of which the last may be on its way."""
    known = request.token_ids(start, start + count)
    return known if len(known) == count else [*known, pending_ids[request]]


def owners(schedule: Schedule) -> list[tuple[Request, int]]:
    """Of each row of logits, in the batch's order: whose it is, and after which of its tokens."""
    return [
        (request, end - wanted + row)
        for request, count in schedule.num_tokens.items()
        for end in [schedule.starts[request] + count]
        for wanted in [num_logit_rows(schedule, request)]
        for row in range(wanted)
    ]


def num_logit_rows(schedule: Schedule, request: Request) -> int:
    """How many of a request's tokens in this step need logits: all, the last, or none."""
    return schedule.num_tokens[request] if request.is_scored else int(request in schedule.ready)


def logit_rows(
    schedule: Schedule, query_start_loc: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[rows] places in the flat batch whose logits are wanted, in its order."""
    rows: list[int] = []
    for request, last in zip(schedule.num_tokens, query_start_loc[1:], strict=True):
        rows.extend(range(int(last) - num_logit_rows(schedule, request), int(last)))
    return np.array(rows, np.int32)
