"""Attention over a sequence's latest rows, which its state keeps, and over entries of a compressed cache."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.compressed import WindowSpec
from pocketllm.engine.backends.cuda.attention import Heads
from pocketllm.engine.backends.cuda.layers.compressed.entries import CompressedCache, keep
from pocketllm.engine.backends.cuda.layers.compressed.kernels.window import window_kernel
from pocketllm.engine.backends.cuda.layers.latent.attention import LINES, Selected
from pocketllm.engine.backends.cuda.layers.latent.kernels.attention import merge_kernel
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch

SPLIT, MOST_SPLITS = (64, 128), (128, 64)
"""Keys in a split at least, and splits at most: of a single row, and of several; part of the numerics version, as are
tiles."""
NEAR, FAR, WIDE_FAR = 16, 32, 16
"""Rows of a window, and entries, that are multiplied at once; of entries in float32."""
STAGES, WARPS = 2, 4
MERGED_AT_ONCE, MERGED_VALUES = 16, 128


@dataclass(frozen=True)
class Far:
    """Entries beside a window: a layer of a compressed cache, and which of its entries."""

    cache: CompressedCache
    layer: int
    selected: Selected | None
    """None: of all whole groups up to a token."""

    def most(self, batch: DeviceBatch) -> int:
        """Entries that a token may attend at most."""
        if self.selected is not None:
            return self.selected.slots.shape[1]
        longest = batch.max_length if batch.is_single else batch.block_table.shape[1] * self.cache.block_size
        return longest // self.cache.ratio


def attend(
    q: Heads, rows: Tensor, sinks: Tensor, kept: Tensor, batch: DeviceBatch, spec: WindowSpec, far: Far | None,
    kv_dtype: torch.dtype, in_splits: bool,
) -> Tensor:  # fmt: skip
    """See `Ops.window_attention`. kept: [slots, window - 1, dim], left with each sequence's last rows as a ring.

    kv_dtype: of entries, and what all rows are multiplied in.
    """
    assert kept.shape[1:] == (spec.window - 1, spec.dim), (kept.shape, spec)
    x, weight, angles, eps, num_freq = q.arguments()
    tokens, device, seqs = len(x), x.device, len(batch.seq_lens)
    selected = None if far is None else far.selected
    table = batch.block_table if selected is None else selected.slots
    lengths = torch.empty(tokens, dtype=torch.int32, device=device)
    entries = torch.empty(0, dtype=kv_dtype, device=device) if far is None else far.cache.rows[far.layer]
    longest = spec.window + (0 if far is None else far.most(batch))
    kind = 0 if tokens == 1 else 1
    least, most = SPLIT[kind] if in_splits else triton.next_power_of_2(longest), MOST_SPLITS[kind]
    splits = min(most, -(-longest // least))
    out = torch.empty(tokens, spec.num_heads * spec.dim, dtype=torch.float32, device=device)
    parts = marks = out
    if splits > 1:
        parts = torch.empty(tokens, spec.num_heads, splits, spec.dim, dtype=torch.float32, device=device)
        marks = torch.empty(tokens, spec.num_heads, splits, 2, dtype=torch.float32, device=device)
    is_wide = kv_dtype == torch.float32
    window_kernel[(-(-spec.num_heads // LINES), splits, tokens)](
        x, weight, angles, rows, kept, entries, sinks, table, table if selected is None else selected.counts,
        batch.state_slots, batch.query_start_loc, batch.seq_lens, batch.positions, parts, marks, out, lengths,
        x.stride(0), rows.stride(0), table.stride(0), seqs, spec.num_heads, splits, least, most, eps, num_freq,
        spec.scale,
        HEADS=LINES, WINDOW=spec.window, PER_BLOCK=1 if far is None else far.cache.block_size,
        RATIO=1 if far is None else far.cache.ratio, NEAR=NEAR, FAR=WIDE_FAR if is_wide else FAR,
        STAGES=1 if is_wide else STAGES, HAS_ENTRIES=far is not None, HAS_SELECTION=selected is not None,
        SEQS=triton.next_power_of_2(seqs), PRECISION="tf32x3" if is_wide else "tf32", num_warps=WARPS,
        **{**q.constants(), "BLOCK": max(16, triton.next_power_of_2(spec.dim))},
    )  # fmt: skip
    if splits > 1:
        chunk = min(MERGED_VALUES, triton.next_power_of_2(spec.dim))
        merge_kernel[(-(-spec.dim // chunk), spec.num_heads, tokens)](
            parts, marks, lengths, lengths, lengths, out, spec.num_heads, splits, least, most,
            RANK=spec.dim, CHUNK=chunk, AT_ONCE=MERGED_AT_ONCE, HAS_SELECTION=True, num_warps=4,
        )  # fmt: skip
    keep(rows, None, kept, batch)
    return out
