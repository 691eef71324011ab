"""Calls of attention: decode steps over caches of some depth, and a piece of a prompt over itself."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.bench.probes.cases import FLOAT_BYTES, Case, Setting, Shape
from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, LatentAttentionSpec

BLOCK_SIZE = 16


def attention(setting: Setting) -> Iterator[Case]:
    """`store_kv` and `attention` of each shape; of a latent cache its own two, under the names of those."""
    for shape in setting.shapes:
        yield from (paged_attention if shape.num_kv_heads else latent_attention)(setting, shape)


def loads(setting: Setting) -> list[tuple[int, int, int]]:
    """(sequences, new tokens of each, tokens of each in the cache before)."""
    return [*((seqs, 1, depth) for seqs, depth in setting.extent.steps), (1, setting.extent.prompt, 0)]


class Places:
    """A cache's blocks, of which each batch takes others until there are none left."""

    def __init__(self, setting: Setting, token_bytes: float) -> None:
        self._setting = setting
        self._token_bytes = token_bytes
        longest = max(seqs * blocks_of(depth + rows) for seqs, rows, depth in loads(setting))
        self.num_blocks = max(longest, setting.turns(token_bytes * BLOCK_SIZE * longest) * longest)

    def batches(self, seqs: int, rows: int, depth: int) -> list[Any]:
        """Such steps as operations take them, in turn."""
        taken = seqs * blocks_of(depth + rows)
        turns = min(self.num_blocks // taken, self._setting.turns(self._token_bytes * seqs * (depth + rows)))
        return [self._setting.resident(step(depth, rows, seqs, turn * taken)) for turn in range(turns)]

    def all_tokens(self) -> Iterator[tuple[int, Any]]:
        """Steps that fill every place, with their tokens: then attention reads numbers and not untouched pages."""
        total, at_once = self.num_blocks * BLOCK_SIZE, self._setting.extent.prompt
        for first in range(0, total, at_once):
            rows = min(at_once, total - first)
            yield rows, step(0, rows, 1, 0, first)


def paged_attention(setting: Setting, shape: Shape) -> Iterator[Case]:
    """Over keys and values of every head."""
    ops, element = setting.ops, setting.cached_bytes(shape.key_dim)
    spec = AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.key_dim, 1 / math.sqrt(shape.key_dim))
    kv_width, q_width = shape.num_kv_heads * shape.key_dim, shape.num_heads * shape.key_dim
    places = Places(setting, 2 * kv_width * element)
    cache = ops.new_kv_cache(1, shape.num_kv_heads, shape.key_dim, shape.key_dim, places.num_blocks, BLOCK_SIZE)
    for rows, batch in places.all_tokens():
        k = setting.rows(rows, kv_width)
        ops.store_kv(cache, 0, k, k, batch)
    ops.synchronize()
    mark, geometry = f" {shape.mark}".rstrip(), f"{shape.num_heads}/{shape.num_kv_heads}·{shape.key_dim}"
    for seqs, rows, depth in loads(setting):
        tokens, batches = seqs * rows, places.batches(seqs, rows, depth)
        q, k = setting.rows(tokens, q_width), setting.rows(tokens, kv_width)
        moved = 2 * seqs * (depth + rows) * kv_width * element + FLOAT_BYTES * 2 * tokens * q_width
        yield Case(
            "attention",
            f"attention{mark} {steps_word(seqs, rows)} over {depth + rows}",
            [partial(ops.attention, q, cache, 0, batch, spec) for batch in batches],
            moved,
            4.0 * seqs * pairs(depth, rows) * q_width,
            kind=setting.capability.kv_dtype,
            shape=f"{geometry}@{depth + rows}",
            rows=tokens,
            peer=() if setting.peer is None else setting.peer.attention(spec, seqs, rows, depth + rows),
        )
        if is_stored(setting, seqs, rows, depth):
            yield Case(
                "store_kv",
                f"store_kv{mark} ×{tokens}",
                [partial(ops.store_kv, cache, 0, k, k, batch) for batch in batches],
                tokens * kv_width * 2 * (FLOAT_BYTES + element),
                kind=setting.capability.kv_dtype,
                shape=str(kv_width),
                rows=tokens,
            )


def latent_attention(setting: Setting, shape: Shape) -> Iterator[Case]:
    """Over rows that all heads share."""
    width = shape.rank + shape.key_dim
    ops, element = setting.ops, setting.cached_bytes(width)
    spec = LatentAttentionSpec(shape.num_heads, shape.rank, shape.key_dim, 1 / math.sqrt(shape.key_dim))
    places = Places(setting, width * element)
    cache = ops.new_latent_cache(1, width, places.num_blocks, BLOCK_SIZE)
    for rows, batch in places.all_tokens():
        ops.store_latent(cache, 0, batch, setting.rows(rows, width))
    for seqs, rows, depth in loads(setting):
        tokens, batches = seqs * rows, places.batches(seqs, rows, depth)
        q_latent, q_rope = (setting.rows(tokens, shape.num_heads * dim) for dim in (shape.rank, shape.key_dim))
        row = setting.rows(tokens, width)
        each = FLOAT_BYTES * shape.num_heads * (width + shape.rank)
        yield Case(
            "attention",
            f"latent_attention {steps_word(seqs, rows)} over {depth + rows}",
            [partial(ops.latent_attention, q_latent, q_rope, cache, 0, batch, spec) for batch in batches],
            seqs * (depth + rows) * width * element + tokens * each,
            2.0 * seqs * pairs(depth, rows) * shape.num_heads * (width + shape.rank),
            kind=setting.capability.kv_dtype,
            shape=f"{shape.num_heads}·{width}@{depth + rows}",
            rows=tokens,
        )
        if is_stored(setting, seqs, rows, depth):
            yield Case(
                "store_kv",
                f"store_latent ×{tokens}",
                [partial(ops.store_latent, cache, 0, batch, row) for batch in batches],
                tokens * width * (FLOAT_BYTES + element),
                kind=setting.capability.kv_dtype,
                shape=str(width),
                rows=tokens,
            )


def is_stored(setting: Setting, seqs: int, rows: int, depth: int) -> bool:
    """Whether storing is timed with this step: once for each number of tokens."""
    tokens = [load[0] * load[1] for load in loads(setting)]
    return loads(setting).index((seqs, rows, depth)) == tokens.index(seqs * rows)


def pairs(depth: int, rows: int) -> int:
    """Of a token and one that it sees."""
    return sum(depth + row + 1 for row in range(rows))


def steps_word(seqs: int, rows: int) -> str:
    """Rows of a call, as names of cases have them."""
    return f"×{rows}" if seqs == 1 else f"{seqs}×{rows}"


def blocks_of(tokens: int) -> int:
    """That so many take."""
    return -(-tokens // BLOCK_SIZE)


def step(depth: int, rows: int, seqs: int = 1, first_block: int = 0, first_slot: int | None = None) -> ForwardBatch:
    """`rows` new tokens of each sequence after `depth` cached ones, in blocks that follow one another from a first one
    on; first_slot: where the tokens go instead."""
    each, positions = blocks_of(depth + rows), np.arange(depth, depth + rows, dtype=np.int32)
    blocks: npt.NDArray[np.int32] = np.arange(first_block, first_block + seqs * each, dtype=np.int32).reshape(seqs, -1)
    slots = blocks[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    if first_slot is not None:
        slots = np.arange(first_slot, first_slot + rows, dtype=np.int64)
    return ForwardBatch(
        input_ids=np.zeros(seqs * rows, np.int32),
        positions=np.tile(positions, seqs),
        query_start_loc=np.arange(0, seqs * rows + 1, rows, dtype=np.int32),
        seq_lens=np.full(seqs, depth + rows, np.int32),
        block_table=blocks,
        slot_mapping=slots.reshape(-1),
        logit_rows=np.arange(rows - 1, seqs * rows, rows, dtype=np.int32),
    )
