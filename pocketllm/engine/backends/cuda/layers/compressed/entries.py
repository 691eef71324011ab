"""A paged cache of one entry for every so many tokens, and what writes entries there."""

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from pocketllm.engine.backends.api.compressed import Compressor
from pocketllm.engine.backends.cuda.layers.compressed.kernels import entries as kernels
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch

VALUES_AT_ONCE = 4096
"""Of a group's tokens together; with the warps part of the numerics version."""
WARPS = 8


@dataclass
class CompressedCache:
    """rows: one tensor a layer, [blocks, entries that may end in a block, dim]."""

    rows: Sequence[Tensor]
    block_size: int
    """Tokens of a block."""
    ratio: int


def compress(
    values: Tensor, gates: Tensor, kept: Tensor, cache: CompressedCache, layer: int, batch: DeviceBatch, how: Compressor
) -> None:
    """See `Ops.compress`. kept: [slots, rows before, 2 * width], left with each sequence's last rows as a ring."""
    members, dim = how.ratio * (2 if how.overlaps else 1), how.dim
    assert kept.shape[1:] == (members - 1, 2 * how.width), (kept.shape, how)
    assert dim % 2 == 0 or how.inv_freq is None, f"{dim} values cannot rotate as neighbors"
    d_block = triton.next_power_of_2(dim)
    norm_weight, eps = (how.position, 0.0) if how.norm is None else (how.norm.weight, how.norm.eps)
    kernels.entries_kernel[(len(values),)](
        values, gates, kept, how.position, norm_weight, how.position if how.inv_freq is None else how.inv_freq,
        cache.rows[layer], batch.state_slots, batch.block_table, batch.query_start_loc, batch.seq_lens, batch.positions,
        len(batch.seq_lens), values.stride(0), gates.stride(0), batch.block_table.stride(0), eps,
        0 if how.inv_freq is None else len(how.inv_freq),
        RATIO=how.ratio, MEMBERS=members, DIM=dim, D_BLOCK=d_block, BLOCK=cache.block_size,
        AT_ONCE=min(triton.next_power_of_2(members), max(1, VALUES_AT_ONCE // d_block)),
        SEQS=triton.next_power_of_2(len(batch.seq_lens)), HAS_NORM=how.norm is not None,
        ROTATES=how.inv_freq is not None, KEEPS=batch.is_single, num_warps=WARPS,
    )  # fmt: skip
    if not batch.is_single:
        keep(values, gates, kept, batch)


def keep(first: Tensor, second: Tensor | None, kept: Tensor, batch: DeviceBatch) -> None:
    """Move a step's rows, `first` (beside `second`), to where the next one finds them: a launch after all that reads
    those before."""
    other = first if second is None else second
    kernels.keep_kernel[(len(first),)](
        first, other, kept, batch.state_slots, batch.query_start_loc, batch.seq_lens, batch.positions,
        len(batch.seq_lens), first.stride(0), other.stride(0),
        ROWS=kept.shape[1], WIDTH=first.shape[1], BLOCK=triton.next_power_of_2(first.shape[1]),
        HAS_SECOND=second is not None, SEQS=triton.next_power_of_2(len(batch.seq_lens)), num_warps=2,
    )  # fmt: skip
