"""Attention over the latest tokens and over compressed groups of all before: what DeepSeek V4 keeps and computes.

The window's rows and the rows of groups that are not whole lie in the slot of a recurrent state, for they are as many
however long the sequence; only entries of whole groups lie in blocks (docs/decisions/0023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.compressed import Compressor, WindowSpec
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Selection, Tensor, Weight
from pocketllm.engine.models.blocks import DENSE_OPS, Binder, Shapes
from pocketllm.engine.models.contract import CacheSpec, CompressedSpec, SeveralCaches, StateSpec
from pocketllm.engine.models.header import HeaderReader, is_list, short, whole_number

OVERLAPPING = 4
"""The ratio whose groups overlap and are picked by an indexer; no key tells it."""
LONGEST = 128
"""Tokens of a longer group, of a model without any."""
COMPRESSED_OPS = (DENSE_OPS - {"new_kv_cache", "rope", "store_kv", "attention", "project_add"}) | {
    *("new_compressed_cache", "new_states", "copy_states", "load_experts", "project_heads"),
    *("rope_last", "compress", "select_entries", "window_attention"),
}


@dataclass(frozen=True)
class CompressedShape:
    """Sizes of the attention of all layers."""

    num_heads: int
    dim: int
    """Of a row, which is key and value of all heads."""
    q_rank: int
    window: int
    ratios: tuple[int, ...]
    """Tokens of a layer's groups; 0: it sees the window alone."""
    num_groups: int
    """Groups of heads with an output matrix of their own."""
    output_rank: int
    """Of each group."""
    index_heads: int
    index_dim: int
    top_k: int

    @property
    def long(self) -> int:
        """The ratio of groups that do not overlap."""
        return max((ratio for ratio in self.ratios if ratio not in (0, OVERLAPPING)), default=LONGEST)

    def place(self, layer: int) -> int:
        """Which of its own kind a layer is."""
        return self.ratios[:layer].count(self.ratios[layer])

    @property
    def cache(self) -> CacheSpec:
        """Entries of short groups, their index keys, entries of long groups; then what a sequence's end needs: rows of
        the window, and of groups that are not whole, of the same three."""
        short, long = self.ratios.count(OVERLAPPING), self.ratios.count(self.long)
        before = 2 * OVERLAPPING - 1
        return SeveralCaches(
            (
                CompressedSpec(short, self.dim, OVERLAPPING),
                CompressedSpec(short, self.index_dim, OVERLAPPING),
                CompressedSpec(long, self.dim, self.long),
                StateSpec(len(self.ratios), (self.window - 1, self.dim)),
                StateSpec(short, (before, 4 * self.dim)),
                StateSpec(short, (before, 4 * self.index_dim)),
                StateSpec(long, (self.long - 1, 2 * self.dim)),
            )
        )


def read_compressed(header: HeaderReader, num_layers: int) -> CompressedShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dim = header.count("attention.key_length")
    for name, only in (("attention.head_count_kv", 1), ("attention.value_length", dim)):
        found = header.count(name, only)
        if found != only:
            header.problems.append(f"metadata key {header.architecture}.{name} is {found}: it must be {only}")
    window = header.count("attention.sliding_window")
    if window < 2:
        header.problems.append(f"metadata key {header.architecture}.attention.sliding_window is 1: it must be above 1")
    return CompressedShape(
        num_heads=header.count("attention.head_count"),
        dim=dim,
        q_rank=header.count("attention.q_lora_rank"),
        window=window,
        ratios=read_ratios(header, num_layers),
        num_groups=header.count("attention.output_group_count"),
        output_rank=header.count("attention.output_lora_rank"),
        index_heads=header.count("attention.indexer.head_count"),
        index_dim=header.count("attention.indexer.key_length"),
        top_k=header.count("attention.indexer.top_k"),
    )


def read_ratios(header: HeaderReader, num_layers: int) -> tuple[int, ...]:
    """`attention.compress_ratios`: of every layer, and maybe of layers after them that are not computed."""
    name = f"{header.architecture}.attention.compress_ratios"
    said = header.metadata.get(name)
    ratios = tuple(whole_number(ratio) for ratio in said) if is_list(said) else ()
    own = tuple(ratio for ratio in ratios[:num_layers] if ratio is not None and ratio >= 0)
    if len(own) != num_layers or len(set(own) - {0, OVERLAPPING}) > 1 or 1 in own:
        header.problems.append(
            f"metadata key {name} is {short(said)}: it must give each layer 0, {OVERLAPPING} or one number above 1"
        )
        return (0,)
    return own


def bad_compression(family: str, shape: CompressedShape, rope_dim: int) -> list[str]:
    """Sizes that are numbers but do not go together."""
    reasons = []
    if shape.num_heads % shape.num_groups:
        reasons.append(
            f"{shape.num_heads} heads ({family}.attention.head_count) cannot form {shape.num_groups} equal groups "
            f"({family}.attention.output_group_count)"
        )
    if shape.index_dim < rope_dim:
        reasons.append(
            f"{family}.attention.indexer.key_length={shape.index_dim} must be at least rope.dimension_count={rope_dim}"
        )
    return reasons


def attention_shapes(shape: CompressedShape, layer: int, hidden: int) -> Shapes:
    """A layer's tensors by the last parts of their names."""
    query, inner = shape.num_heads * shape.dim, shape.num_groups * shape.output_rank
    shapes: Shapes = {
        "attn_sinks.weight": (shape.num_heads,),
        "attn_q_a.weight": (shape.q_rank, hidden),
        "attn_q_a_norm.weight": (shape.q_rank,),
        "attn_q_b.weight": (query, shape.q_rank),
        "attn_kv.weight": (shape.dim, hidden),
        "attn_kv_a_norm.weight": (shape.dim,),
        "attn_output_a.weight": (inner, query // shape.num_groups),
        "attn_output_b.weight": (hidden, inner),
    }
    ratio = shape.ratios[layer]
    if ratio:
        shapes |= compressor_shapes("attn", ratio, shape.dim, hidden)
    if ratio == OVERLAPPING:
        shapes |= compressor_shapes("indexer", ratio, shape.index_dim, hidden)
        shapes["indexer.attn_q_b.weight"] = (shape.index_heads * shape.index_dim, shape.q_rank)
        shapes["indexer.proj.weight"] = (shape.index_heads, hidden)
    return shapes


def compressor_shapes(prefix: str, ratio: int, dim: int, hidden: int) -> Shapes:
    """Tensors of `attn_compressor_` or `indexer_compressor_`."""
    width = dim * (2 if ratio == OVERLAPPING else 1)
    return {
        f"{prefix}_compressor_ape.weight": (ratio, width),
        f"{prefix}_compressor_norm.weight": (dim,),
        f"{prefix}_compressor_gate.weight": (width, hidden),
        f"{prefix}_compressor_kv.weight": (width, hidden),
    }


@dataclass(frozen=True)
class Step:
    """One step's input to every layer: batch, angles of both kinds of layers, and caches as `cache` has them."""

    batch: ForwardBatch
    angles: Tensor
    compressed_angles: Tensor
    caches: Sequence[KVCache]


@dataclass(frozen=True)
class GroupMaker:
    """What makes entries of groups: the projections to values and gates, and where its caches are."""

    values: Projection
    gates: Projection
    how: Compressor
    entries: int
    state: int
    """Which of the caches."""
    place: int

    def store(self, x: Tensor, ops: Ops, step: Step) -> None:
        """Write the entries of groups that end in this step."""
        values, gates = ops.project(x, self.values, self.gates)
        states, cache = step.caches[self.state], step.caches[self.entries]
        ops.compress(values, gates, states, self.place, cache, self.place, step.batch, self.how)


@dataclass(frozen=True)
class EntryIndexer:
    """What picks a layer's entries."""

    groups: GroupMaker
    q: Projection
    weights: Projection
    spec: IndexerSpec

    def select(self, x: Tensor, source: Tensor, ops: Ops, step: Step) -> Selection:
        """Which entries each row attends; source: what queries are made of. Scales of scores choose nothing."""
        self.groups.store(x, ops, step)
        q = ops.rope_last(ops.project(source, self.q)[0], step.compressed_angles, self.spec.dim)
        [weights] = ops.project(x, self.weights)
        cache = step.caches[self.groups.entries]
        return ops.select_entries(q, weights, cache, self.groups.place, step.batch, self.spec)


@dataclass(frozen=True)
class CompressedAttention:
    """One layer's attention."""

    layer: int
    q_down: Projection
    q_down_norm: Norm
    q: Projection
    q_norm: Norm
    """Its weight is 1 everywhere: of each head."""
    kv: Projection
    kv_norm: Norm
    sinks: Tensor
    groups: GroupMaker | None
    indexer: EntryIndexer | None
    output_by_group: Weight
    output: Projection
    spec: WindowSpec

    def of(self, x: Tensor, ops: Ops, step: Step) -> Tensor:
        """What attention makes of normed rows: [tokens, hidden] → the same."""
        down, row = ops.project(x, self.q_down, self.kv)
        source = ops.rms_norm(down, self.q_down_norm)
        angles = step.angles if self.groups is None else step.compressed_angles
        q = ops.rms_norm(ops.project(source, self.q)[0], self.q_norm)
        q = ops.rope_last(q, angles, self.spec.dim)
        row = ops.rope_last(ops.rms_norm(row, self.kv_norm), angles, self.spec.dim)
        near = (q, row, self.sinks, step.caches[3], self.layer, step.batch, self.spec)
        if self.groups is None:
            found = ops.window_attention(*near)
        else:
            self.groups.store(x, ops, step)
            selection = None if self.indexer is None else self.indexer.select(x, source, ops, step)
            cache = step.caches[self.groups.entries]
            found = ops.window_attention(*near, cache, self.groups.place, selection)
        found = ops.rope_last(found, angles, self.spec.dim, inverse=True)
        return ops.project(ops.project_heads(found, self.output_by_group), self.output)[0]


def bind_attention(bind: Binder, shape: CompressedShape, layer: int, inv_freq: Tensor) -> CompressedAttention:
    """A layer's attention. inv_freq: of layers that compress."""
    block, ratio = f"blk.{layer}.", shape.ratios[layer]
    table, name = bind.checkpoint.tensors, f"{block}attn_output_a.weight"
    by_group = (shape.num_groups, shape.output_rank, table[name].shape[1])
    return CompressedAttention(
        layer=layer,
        q_down=bind.projection(f"{block}attn_q_a"),
        q_down_norm=bind.norm(f"{block}attn_q_a_norm"),
        q=bind.projection(f"{block}attn_q_b"),
        q_norm=Norm(bind.ops.load_vector(np.ones(shape.dim, np.float32)), bind.eps),
        kv=bind.projection(f"{block}attn_kv"),
        kv_norm=bind.norm(f"{block}attn_kv_a_norm"),
        sinks=bind.vector(f"{block}attn_sinks.weight"),
        groups=bind_groups(bind, shape, layer, "attn", inv_freq) if ratio else None,
        indexer=bind_indexer(bind, shape, layer, inv_freq) if ratio == OVERLAPPING else None,
        output_by_group=bind.ops.load_experts(bind.checkpoint.data(name), table[name].quant_type, by_group),
        output=bind.projection(f"{block}attn_output_b"),
        spec=WindowSpec(shape.num_heads, shape.dim, shape.window, shape.dim**-0.5),
    )


def bind_indexer(bind: Binder, shape: CompressedShape, layer: int, inv_freq: Tensor) -> EntryIndexer:
    """The indexer of a layer whose groups overlap."""
    return EntryIndexer(
        groups=bind_groups(bind, shape, layer, "indexer", inv_freq),
        q=bind.projection(f"blk.{layer}.indexer.attn_q_b"),
        weights=bind.projection(f"blk.{layer}.indexer.proj"),
        spec=IndexerSpec(shape.index_heads, shape.index_dim, shape.top_k),
    )


def bind_groups(bind: Binder, shape: CompressedShape, layer: int, prefix: str, inv_freq: Tensor) -> GroupMaker:
    """What makes a layer's entries (`attn`) or index keys (`indexer`)."""
    name, ratio = f"blk.{layer}.{prefix}_compressor", shape.ratios[layer]
    kind = 1 if prefix == "indexer" else 0 if ratio == OVERLAPPING else 2
    return GroupMaker(
        values=bind.projection(f"{name}_kv"),
        gates=bind.projection(f"{name}_gate"),
        how=Compressor(
            ratio=ratio,
            dim=shape.index_dim if prefix == "indexer" else shape.dim,
            overlaps=ratio == OVERLAPPING,
            position=bind.vector(f"{name}_ape.weight"),
            norm=bind.norm(f"{name}_norm"),
            inv_freq=inv_freq,
        ),
        entries=kind,
        state=4 + kind,
        place=shape.place(layer),
    )
