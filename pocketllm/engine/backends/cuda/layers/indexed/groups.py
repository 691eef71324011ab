"""Groups of tokens that an index picks, and attention over them."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.api.indexed import GroupIndex
from pocketllm.engine.backends.cuda.attention import Heads, PagedCache
from pocketllm.engine.backends.cuda.kernels.heads import angles_kernel
from pocketllm.engine.backends.cuda.layers.indexed.kernels import groups as kernels
from pocketllm.engine.backends.cuda.layers.latent.kernels import selection
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch

SCORES_AT_ONCE = 1 << 25
"""Scores in memory: 128 MiB."""
TILE, CHUNK, KEYS = 32, 2048, 64
"""Groups that one program scores, those that are looked at together when the best are found, and keys that are
multiplied at once."""
KEY_BYTES = 160 << 10
"""Shared memory of keys and values that are multiplied or on their way."""


@dataclass(frozen=True)
class Groups:
    """Which groups each token of a step attends, beside the tokens after its last whole one."""

    numbers: Tensor
    """int32 [tokens, most], in the order of the sequence; the first `counts` of each."""
    counts: Tensor
    """int32 [tokens]"""
    ratio: int
    """Tokens of a group."""


def group_angles(inv_freq: Tensor, count: int, ratio: int) -> Tensor:
    """Cosines and sines at the first token of each group: [groups, 2, frequencies]."""
    places = torch.arange(count, dtype=torch.int32, device=inv_freq.device) * ratio
    out = torch.empty(count, 2, len(inv_freq), dtype=torch.float32, device=inv_freq.device)
    angles_kernel[(count,)](
        places, inv_freq, out, 1.0, len(inv_freq), BLOCK=triton.next_power_of_2(len(inv_freq)), num_warps=1
    )
    return out


def select_groups(q: Tensor, rows: Tensor, batch: DeviceBatch, index: GroupIndex, angles: Tensor) -> Groups:
    """The num_best best of each token's own groups. rows: of a layer of the cache, [blocks, block_size, dim]; angles:
    as `group_angles` gives them, of as many groups as there may be."""
    tokens, (seqs, width), block_size, most = len(q), batch.block_table.shape, rows.shape[1], len(angles)
    at_once = min(tokens, max(1, SCORES_AT_ONCE // most))
    scores = torch.empty(at_once, most, dtype=torch.float32, device=q.device)
    numbers = torch.empty(tokens, min(index.num_best, most), dtype=torch.int32, device=q.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=q.device)
    where = batch.block_table, batch.query_start_loc, batch.seq_lens, batch.positions
    known = {"BLOCK": block_size, "RATIO": index.ratio, "SEQS": triton.next_power_of_2(seqs)}
    for first in range(0, tokens, at_once):
        some = min(at_once, tokens - first)
        kernels.worth_kernel[(some, -(-most // TILE))](
            q, rows, index.norm.weight, angles, *where, scores, first, seqs, q.stride(0), width,
            most, index.norm.eps, angles.shape[-1],
            HEADS=index.num_heads, H_BLOCK=max(16, triton.next_power_of_2(index.num_heads)), DIM=index.dim,
            D_BLOCK=max(16, triton.next_power_of_2(index.dim)), TILE=TILE, **known, num_warps=4,
        )  # fmt: skip
        selection.pick_kernel[(some,)](
            scores, *where, numbers, counts, first, seqs, width, most, numbers.shape[1],
            TOP=index.num_best, GIVES=selection.NUMBERS.value, R_BLOCK=1, CHUNK=CHUNK, **known, num_warps=8,
        )  # fmt: skip
    return Groups(numbers, counts, index.ratio)


def attend_groups(
    q: Heads, cache: PagedCache, layer: int, batch: DeviceBatch, spec: AttentionSpec, selected: Groups
) -> Tensor:
    """Each token over its own groups and the tokens after them: [tokens, heads · v_dim], float32."""
    keys, values = cache.keys[layer], cache.values[layer]
    x, weight, angles, eps, num_freq = q.arguments()
    tokens, kv_heads, v_dim, seqs = len(x), keys.shape[2], values.shape[3], len(batch.seq_lens)
    group, shape = spec.num_heads // kv_heads, q.constants()
    v_block, d_block = triton.next_power_of_2(v_dim), shape.pop("BLOCK")
    out = torch.empty(tokens, spec.num_heads * v_dim, dtype=torch.float32, device=x.device)
    tile_bytes = KEYS * (d_block + v_block) * keys.element_size()
    kernels.attention_kernel[(tokens, kv_heads)](
        x, weight, angles, keys, values, batch.block_table, batch.query_start_loc, batch.seq_lens, batch.positions,
        selected.numbers, selected.counts, out, seqs, x.stride(0), batch.block_table.stride(0),
        selected.numbers.stride(0), kv_heads, eps, num_freq, spec.scale, spec.softcap or 0.0,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D_BLOCK=d_block, V_DIM=v_dim, V_BLOCK=v_block,
        BLOCK=keys.shape[1], RATIO=selected.ratio, TILE=KEYS, SEQS=triton.next_power_of_2(seqs),
        HAS_SOFTCAP=spec.softcap is not None, **shape, num_warps=4, num_stages=3 if 2 * tile_bytes <= KEY_BYTES else 1,
    )  # fmt: skip
    return out
