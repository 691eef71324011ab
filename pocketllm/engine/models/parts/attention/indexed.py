"""Gated attention over the groups of tokens that an index picks, in turns with recurrent layers: qwen4exp's."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.indexed import GroupIndex
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, States, Tensor
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.header import HeaderReader, is_list, short, whole_number
from pocketllm.engine.models.parts.hybrid import HybridShape

INDEXED_OPS = frozenset({"new_latent_cache", "store_latent", "select_groups", "selected_attention"})


@dataclass(frozen=True)
class IndexShape:
    """Sizes of a layer's index."""

    num_heads: int
    dim: int
    ratio: int
    """Tokens of a group."""
    num_best: int
    """Groups that a query attends."""

    def tensors(self, hidden: int) -> Shapes:
        """By the names behind `indexer.`, without `.weight`."""
        return {
            "q_proj": (self.num_heads * self.dim, hidden),
            "k_proj": (self.dim, hidden),
            "q_norm": (self.dim,),
            "k_norm": (self.dim,),
        }


def read_index(header: HeaderReader, hybrid: HybridShape) -> IndexShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    ratio, name = read_ratio(header, hybrid), "attention.indexer.top_k"
    budget = header.count(name)
    if budget % ratio:
        header.problems.append(
            f"metadata key {header.architecture}.{name} is {budget}: it must be whole groups of {ratio}"
        )
    return IndexShape(
        num_heads=header.count("attention.indexer.head_count"),
        dim=header.count("attention.indexer.key_length"),
        ratio=ratio,
        num_best=budget // ratio,
    )


def read_ratio(header: HeaderReader, hybrid: HybridShape) -> int:
    """Tokens of a group: one number for all layers with attention, 0 for the others."""
    name = f"{header.architecture}.attention.compress_ratios"
    ratios = header.metadata.get(name)
    own = header.of_layers(ratios, hybrid.dense.num_layers) if is_list(ratios) else ()
    told = [whole_number(ratio) or 0 for ratio in own]
    largest = max(told, default=0)
    if largest < 1 or told != [0 if is_recurrent else largest for is_recurrent in hybrid.is_recurrent]:
        header.problems.append(
            f"metadata key {name} is {short(ratios)}: it must be one number for all layers with attention, 0 for others"
        )
        return 1
    return largest


@dataclass(frozen=True)
class Step:
    """What the layers of one forward pass share."""

    batch: ForwardBatch
    angles: Tensor
    kv: KVCache
    index_keys: KVCache
    states: States


@dataclass(frozen=True)
class IndexedAttention:
    """Gated attention with normed heads, over the groups of tokens that an index picks."""

    q: Projection
    gate: Projection
    k: Projection
    v: Projection
    q_norm: Norm
    k_norm: Norm
    index_q: Projection
    index_k: Projection
    index_q_norm: Norm
    output: Projection
    spec: AttentionSpec
    index: GroupIndex
    place: int

    def of(self, y: Tensor, ops: Ops, step: Step) -> Tensor:
        parts = self.q, self.gate, self.k, self.v, self.index_q, self.index_k
        q, gate, k, v, index_q, index_k = ops.project(y, *parts)
        turn = partial(ops.rope, angles=step.angles, layout=RopeLayout.HALF_SPLIT)
        q = turn(ops.rms_norm(q, self.q_norm), head_dim=self.spec.head_dim)
        k = turn(ops.rms_norm(k, self.k_norm), head_dim=self.spec.head_dim)
        index_q = turn(ops.rms_norm(index_q, self.index_q_norm), head_dim=self.index.dim)
        ops.store_kv(step.kv, self.place, k, v, step.batch)
        ops.store_latent(step.index_keys, self.place, step.batch, index_k)
        selection = ops.select_groups(index_q, step.index_keys, self.place, step.batch, self.index)
        seen = ops.selected_attention(q, step.kv, self.place, step.batch, self.spec, selection)
        return ops.project(ops.sigmoid_mul(gate, seen), self.output)[0]


def bind_indexed(
    bind: Binder, hybrid: HybridShape, index: IndexShape, number: int, inv_freq: Tensor
) -> IndexedAttention:
    """A layer's attention; a head's rows of `attn_q` are its query's, then its gate's."""
    block, dense = f"blk.{number}.", hybrid.dense
    by_head = np.arange(2 * dense.num_heads * dense.head_dim).reshape(dense.num_heads, 2, dense.head_dim)
    q, gate = bind.rows(f"{block}attn_q", by_head[:, 0], by_head[:, 1])
    k_norm = bind.norm(f"{block}indexer.k_norm")
    return IndexedAttention(
        q=q,
        gate=gate,
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        k_norm=bind.norm(f"{block}attn_k_norm"),
        index_q=bind.projection(f"{block}indexer.q_proj"),
        index_k=bind.projection(f"{block}indexer.k_proj"),
        index_q_norm=bind.norm(f"{block}indexer.q_norm"),
        output=bind.projection(f"{block}attn_output"),
        spec=AttentionSpec(dense.num_heads, dense.num_kv_heads, dense.head_dim, dense.head_dim**-0.5),
        index=GroupIndex(index.num_heads, index.dim, index.ratio, index.num_best, k_norm, inv_freq),
        place=hybrid.place(number),
    )
