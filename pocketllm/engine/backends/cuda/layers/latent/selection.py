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


def select_keys(q: Tensor, weights: Tensor, rows: Tensor, batch: DeviceBatch, spec: IndexerSpec) -> Selected:
    """The top_k best of each token's own keys. rows: of a layer of the cache, [blocks, block_size, dim]."""
    tokens, (seqs, width), block_size = len(q), batch.block_table.shape, rows.shape[1]
    longest = batch.max_length if len(batch.single_seqs) == tokens else width * block_size
    at_once = min(tokens, max(1, SCORES_AT_ONCE // longest))
    scores = torch.empty(at_once, longest, dtype=torch.float32, device=q.device)
    slots = torch.empty(tokens, min(spec.top_k, longest), dtype=torch.int32, device=q.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    where = batch.block_table, batch.query_start_loc, batch.seq_lens, batch.positions
    known = {"BLOCK": block_size, "RATIO": 1, "SEQS": triton.next_power_of_2(seqs)}
    for first in range(0, tokens, at_once):
        some = min(at_once, tokens - first)
        kernels.scores_kernel[(some, -(-longest // TILE))](
            q, weights, rows, *where, scores, first, seqs, q.stride(0), weights.stride(0), width, longest,
            HEADS=spec.num_heads, H_BLOCK=max(16, triton.next_power_of_2(spec.num_heads)), DIM=spec.dim,
            D_BLOCK=max(16, triton.next_power_of_2(spec.dim)), TILE=TILE, **known, num_warps=4,
        )  # fmt: skip
        kernels.pick_kernel[(some,)](
            scores, *where, slots, counts, first, seqs, width, longest, slots.shape[1],
            TOP=spec.top_k, CHUNK=CHUNK, **known, num_warps=8,
        )  # fmt: skip
    return Selected(slots, counts)
