"""Which cached rows each token of a step attends, found on the device."""

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import IndexerSpec
from pocketllm.engine.backends.cuda.layers.latent.attention import Selected
from pocketllm.engine.backends.cuda.layers.latent.kernels import selection as kernels
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch

SCORES_AT_ONCE = 1 << 25
"""Scores in memory: 128 MiB."""
TILE, CHUNK = 64, 2048
"""Entries that one program scores, and that are looked at together when the best are found."""


def num_entries(batch: DeviceBatch, block_size: int, ratio: int) -> int:
    """Groups of `ratio` tokens that the longest sequence of a step may have."""
    width = batch.block_table.shape[1]
    return max(1, (batch.max_length if batch.is_single else width * block_size) // ratio)


def select_entries(
    q: Tensor,
    weights: Tensor,
    rows: Tensor,
    batch: DeviceBatch,
    spec: IndexerSpec,
    block_size: int,
    ratio: int = 1,
    gives: int = kernels.ENTRIES.value,
) -> Selected:
    """The top_k best of each token's own keys. rows: of a layer of the cache, [blocks, keys of a block, dim].

    block_size: tokens of a block, of which `ratio` whole ones up to a token have a key; gives: slots of ENTRIES, or of
    those TOKENS and of what comes after the last whole group.
    """
    tokens, (seqs, width), most = len(q), batch.block_table.shape, num_entries(batch, block_size, ratio)
    at_once = min(tokens, max(1, SCORES_AT_ONCE // most))
    scores = torch.empty(at_once, most, dtype=torch.float32, device=q.device)
    best = min(spec.top_k, most)
    num_slots = best if gives == kernels.ENTRIES.value else (best + 1) * ratio - 1
    slots = torch.empty(tokens, num_slots, dtype=torch.int32, device=q.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    where = batch.block_table, batch.query_start_loc, batch.seq_lens, batch.positions
    known = {"BLOCK": block_size, "RATIO": ratio, "SEQS": triton.next_power_of_2(seqs)}
    for first in range(0, tokens, at_once):
        some = min(at_once, tokens - first)
        kernels.scores_kernel[(some, -(-most // TILE))](
            q, weights, rows, *where, scores, first, seqs, q.stride(0), weights.stride(0), width, most,
            HEADS=spec.num_heads, H_BLOCK=max(16, triton.next_power_of_2(spec.num_heads)), DIM=spec.dim,
            D_BLOCK=max(16, triton.next_power_of_2(spec.dim)), TILE=TILE, **known, num_warps=4,
        )  # fmt: skip
        kernels.pick_kernel[(some,)](
            scores, *where, slots, counts, first, seqs, width, most, num_slots,
            TOP=spec.top_k, GIVES=gives, R_BLOCK=triton.next_power_of_2(ratio), CHUNK=CHUNK, **known, num_warps=8,
        )  # fmt: skip
    return Selected(slots, counts)
