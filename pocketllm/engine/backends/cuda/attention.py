"""Paged keys and values in GPU memory, and attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.api.ops import Norm, RopeLayout
from pocketllm.engine.backends.cuda.kernels import attention as kernels
from pocketllm.engine.backends.cuda.kernels.heads import heads_kernel, store_kernel
from pocketllm.engine.backends.cuda.kernels.single import Halves
from pocketllm.engine.backends.cuda.layouts import UNIT
from pocketllm.engine.backends.cuda.packing import units_of
from pocketllm.engine.backends.cuda.steps.batch import TILE_QUERIES, DeviceBatch

SPLIT, SPLIT_TILE = 256, 64
"""Keys in one split of a decode step, and of those that are multiplied at once; part of the numerics version."""
SPLIT_STAGES, SPLIT_WARPS = 3, 8
"""Tiles that are on their way or being multiplied; no sum depends on it."""
SPLIT_REGISTERS, CAPPED_BYTES = 128, 512
"""Of a thread, so that two programs share a multiprocessor, of numbers of eight bits or where splits are taken in turn;
others do as well untold. Where a key and its value have more bytes together, numbers would move to memory and back."""
UNDER_WAY_BYTES = 1 << 16
"""Shared memory for tiles that are on their way: with more, smaller GPUs would not start the kernel."""
TILE_KEYS = 64
TILE_BYTES = 200 << 10
"""Shared memory of a tile of queries and of keys and values that are multiplied or on their way."""
MERGED_AT_ONCE = 16
"""Splits; part of the numerics version too."""
TOGETHER, SPARE = 264, 4
"""Programs that an H200 runs at once, two on each multiprocessor, and how many times as many are started at most, so
that one long sequence among short ones is still shared. Steps that cannot have two splits for each of them are
compiled without turns. No sum depends on them."""
WHOLE = 2
"""Splits' worth of keys that one program takes where sequences are several, if a sequence has no more: two programs and
what puts them together take longer. Part of the numerics version too."""


class LastValues(Enum):
    """How the last values of a head rotate as neighbors: by its token's angles, or back by them."""

    FORWARD = "forward"
    BACK = "back"


ROTATIONS = {
    None: 0, RopeLayout.ADJACENT: 1, RopeLayout.HALF_SPLIT: 2, LastValues.FORWARD: 3, LastValues.BACK: 4
}  # fmt: skip


@dataclass
class PagedCache:
    """keys and values: one tensor a layer, [blocks, block_size, heads, dim]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    in_windows: bool = False
    """Whether a batch's window_table and window_slots are of its blocks."""
    is_invariant: bool = False
    """Whether splits of a sequence's keys must not depend on how many sequences a step has."""
    key_scales: Sequence[Tensor] = ()
    value_scales: Sequence[Tensor] = ()
    """What numbers of eight bits are multiplied by, float32 [blocks, heads, block_size]; none of wider ones."""
    counters: dict[int, Tensor] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel takes: keys, values and their scales; without any, something that it does not read."""
        keys, values = self.keys[layer], self.values[layer]
        if not self.key_scales:
            return keys, values, keys, values
        return keys, values, self.key_scales[layer], self.value_scales[layer]

    def tensors(self) -> list[Tensor]:
        """All that lies in blocks."""
        return [*self.keys, *self.values, *self.key_scales, *self.value_scales]

    def arrivals(self, count: int) -> Tensor:
        """`count` zeros at least, int32: splits count themselves there, and the last one puts its zero back, so layers
        and steps share them. They stay where they are: graphs have been captured with them."""
        size = triton.next_power_of_2(count)
        if size not in self.counters:
            self.counters[size] = torch.zeros(size, dtype=torch.int32, device=self.keys[0].device)
        return self.counters[size]


@dataclass(frozen=True)
class Heads:
    """Heads that are normed and rotated where they are read: [tokens, heads · head_dim]."""

    x: Tensor
    head_dim: int
    norm: Norm | None = None
    angles: Tensor | None = None
    layout: RopeLayout | LastValues | None = None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, float, int]:
        """What a kernel takes: heads, weight, angles, eps, frequencies."""
        weight, eps = (self.x, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        if self.angles is None:
            return self.x, weight, self.x, eps, 1
        return self.x, weight, self.angles, eps, self.angles.shape[-1]

    def constants(self) -> dict[str, int | bool]:
        """What a kernel is compiled for."""
        return {
            "DIM": self.head_dim,
            "BLOCK": triton.next_power_of_2(self.head_dim),
            "HAS_NORM": self.norm is not None,
            "ROTATION": ROTATIONS[self.layout],
        }

    def written(self) -> Tensor:
        """The same as plain rows."""
        x, weight, angles, eps, num_freq = self.arguments()
        tokens, heads = len(x), x.shape[1] // self.head_dim
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        heads_kernel[(tokens, heads)](
            x, weight, angles, out, x.stride(0), heads, eps, num_freq, **self.constants(), num_warps=1
        )
        return out


def store(k: Heads, v: Tensor, cache: PagedCache, layer: int, slots: Tensor) -> None:
    """Write a step's keys and values at their slots."""
    x, weight, angles, eps, num_freq = k.arguments()
    keys, values, *scales = cache.of(layer)
    heads, v_dim = keys.shape[2], values.shape[3]
    store_kernel[(len(x), heads)](
        x, v, weight, angles, keys, values, *scales, slots, x.stride(0), v.stride(0), heads, eps, num_freq,
        V_DIM=v_dim, V_BLOCK=triton.next_power_of_2(v_dim), TOKENS=keys.shape[1], **k.constants(), num_warps=1,
    )  # fmt: skip


@dataclass(frozen=True)
class New:
    """A step's keys and values that are not in the cache yet: attention takes them from here, and keeps them there."""

    k: Heads
    v: Tensor


def attend(
    q: Heads, cache: PagedCache, layer: int, batch: DeviceBatch, spec: AttentionSpec, new: New | None = None,
    halves: Halves | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each sequence's new tokens over its own cached ones: [tokens, heads · v_dim], float32.

    halves: where the same is written for the next product, of a single row. `new`: of a step of single tokens alone.
    sinks: [heads] a score more for each softmax, which has no value.
    """
    kept = cache.of(layer)
    keys, values = kept[:2]
    out = torch.empty(len(q.x), spec.num_heads * values.shape[3], dtype=torch.float32, device=q.x.device)
    shape = q.constants()
    constants = {
        **shape, "D_BLOCK": shape["BLOCK"], "GROUP": spec.num_heads // keys.shape[2], "V_DIM": values.shape[3],
        "V_BLOCK": triton.next_power_of_2(values.shape[3]), "BLOCK": keys.shape[1],
        "HAS_SOFTCAP": spec.softcap is not None, "HAS_WINDOW": spec.window is not None,
        "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    own_sinks = q.x if sinks is None else sinks
    if len(batch.single_seqs):
        arrivals = cache.arrivals(len(batch.single_seqs) * keys.shape[2])
        whole = SPLIT if cache.is_invariant or len(batch.single_seqs) == 1 else WHOLE * SPLIT
        attend_singles(q, own_sinks, kept, batch, spec, constants, new, arrivals, out, halves, whole)
    if len(batch.tile_seqs):
        attend_tiles(q, own_sinks, kept, batch, spec, constants, out)
    return out


def attend_singles(
    q: Heads, sinks: Tensor, kept: tuple[Tensor, ...], batch: DeviceBatch, spec: AttentionSpec,
    constants: dict[str, int | bool], new: New | None, arrivals: Tensor, out: Tensor, halves: Halves | None, whole: int,
) -> None:  # fmt: skip
    """Sequences with one token: each split of their keys by itself, put together by the last of them."""
    x, weight, angles, eps, num_freq = q.arguments()
    keys, values = kept[:2]
    singles, heads, kv_heads, v_dim = len(batch.single_seqs), spec.num_heads, keys.shape[2], values.shape[3]
    splits, group, units = -(-batch.max_length // SPLIT), heads // kv_heads, units_of(out.shape[1])
    parts = torch.empty(singles, heads, splits, v_dim, dtype=torch.float32, device=x.device)
    marks = torch.empty(singles, heads, splits, 2, dtype=torch.float32, device=x.device)
    each = (constants["D_BLOCK"] + constants["V_BLOCK"]) * keys.element_size()
    tile = SPLIT_TILE if SPLIT_TILE * each <= TILE_BYTES else SPLIT_TILE // 2
    tile_bytes = tile * each
    stages = SPLIT_STAGES if (SPLIT_STAGES - 1) * tile_bytes <= UNDER_WAY_BYTES else 1
    programs, has_turns = programs_of(singles * kv_heads, splits)
    is_capped = (has_turns or keys.element_size() == 1) and each <= CAPPED_BYTES
    k, k_weight, _, k_eps, _ = (x, weight, x, eps, 1) if new is None else new.k.arguments()
    v = x if new is None else new.v
    kernels.split_kernel[(singles, kv_heads, programs)](
        x, weight, angles, k, k_weight, v, sinks, batch.slot_mapping, *kept, batch.block_table, batch.seq_lens,
        batch.single_seqs, batch.single_tokens, parts, marks, arrivals, out,
        *((out, out) if halves is None else (halves.words, halves.marks)),
        x.stride(0), k.stride(0), v.stride(0), batch.block_table.stride(0), kv_heads, splits, eps, k_eps, num_freq,
        spec.scale, spec.softcap or 0.0, spec.window or 0, units,
        HEADS=triton.next_power_of_2(group), ROWS=max(16, triton.next_power_of_2(group)), SPLIT=SPLIT,
        WHOLE=whole, TILE=tile, AT_ONCE=MERGED_AT_ONCE, STAGES=stages, TOGETHER=TOGETHER,
        HAS_TURNS=has_turns, SEQS=triton.next_power_of_2(singles) if has_turns else 1,
        HAS_NEW=new is not None, HAS_HALVES=halves is not None, IS_FULL=units * UNIT == out.shape[1], **constants,
        num_warps=SPLIT_WARPS, **({"maxnreg": SPLIT_REGISTERS} if is_capped else {}),
    )  # fmt: skip


def programs_of(pairs: int, splits: int) -> tuple[int, bool]:
    """Programs for so many splits of each sequence and key head, and whether one may take several in turn."""
    if pairs * splits <= 2 * TOGETHER:
        return splits, False
    return min(splits, max(1, SPARE * TOGETHER // pairs)), True


def attend_tiles(
    q: Heads, sinks: Tensor, kept: tuple[Tensor, ...], batch: DeviceBatch, spec: AttentionSpec,
    constants: dict[str, int | bool], out: Tensor,
) -> None:  # fmt: skip
    """Sequences with more tokens: each tile of them by itself."""
    x, weight, angles, eps, num_freq = q.arguments()
    keys = kept[0]
    kernels.tiles_kernel[(len(batch.tile_seqs), spec.num_heads)](
        x, weight, angles, sinks, *kept, batch.block_table, batch.seq_lens, batch.query_start_loc,
        batch.tile_seqs, batch.tile_firsts, out, x.stride(0), batch.block_table.stride(0), spec.num_heads,
        keys.shape[2], eps, num_freq, spec.scale, spec.softcap or 0.0, spec.window or 0,
        QUERIES=TILE_QUERIES, **tile_shape(constants["D_BLOCK"], constants["V_BLOCK"], max(2, keys.element_size())),
        **constants,
    )  # fmt: skip


def tile_shape(key: int, value: int, element_bytes: int) -> dict[str, int]:
    """Keys that a tile of queries meets at once, and how such a program is compiled: wide heads have more threads, and
    fewer keys under way, or fewer keys, where those would not fit a multiprocessor's shared memory."""
    queries, each = TILE_QUERIES * key * element_bytes, (key + value) * element_bytes
    tile = TILE_KEYS
    while tile > 16 and queries + tile * each > TILE_BYTES:
        tile //= 2
    stages = 3 if queries + 2 * tile * each <= TILE_BYTES else 1
    return {"TILE": tile, "num_warps": 4 if key < 256 else 8, "num_stages": stages}
