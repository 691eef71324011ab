"""Latent attention in which nothing rotates, over the tokens of the pools that an indexer picks.

DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv 2512.02556) for the indexer. Its keys are pooled: every so many tokens become
one, weighed by a softmax over them for each of its values; whole pools are picked, and what comes after the last whole
one is always attended. A sequence's unfinished pool is a state of its own (docs/decisions/0023).
"""

from dataclasses import dataclass

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.compressed import Compressor
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Selection, States, Tensor, Weight
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.contract import CacheSpec, CompressedSpec, LatentSpec, StateSpec
from pocketllm.engine.models.header import HeaderReader, is_list, short

POOLED_OPS = frozenset(
    {"new_latent_cache", "new_compressed_cache", "new_states", "copy_states", "load_experts", "project_heads"}
    | {"layer_norm", "compress", "select_pools", "store_latent", "latent_attention", "columns"}
)
POOLED_NEUTRAL = {"rope.dimension_count": 0, "attention.indexer.kpool_select_tail": True}
"""Keys that would change the computation, with the value at which they do not."""
NORM_EPS = 1e-6
"""Of the norm of index keys, where `attention.layer_norm_epsilon` does not say."""


@dataclass(frozen=True)
class PooledShape:
    """Sizes of a layer's attention and of its indexer."""

    num_heads: int
    q_rank: int
    rank: int
    """Of the latent."""
    key_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_eps: float
    ratio: int
    """Tokens of a pool."""
    num_best: int
    """Pools that a query attends."""

    def caches(self, num_layers: int, num_indexers: int) -> tuple[CacheSpec, CacheSpec, CacheSpec]:
        """Latents, pooled index keys, and what an unfinished pool's tokens give."""
        return (
            LatentSpec(num_layers, self.rank),
            CompressedSpec(num_indexers, self.index_dim, self.ratio),
            StateSpec(num_indexers, (self.ratio - 1, 2 * self.index_dim)),
        )

    def tensors(self, hidden: int, has_indexer: bool) -> Shapes:
        """By the last parts of their names."""
        names: Shapes = {
            "attn_q_a": (self.q_rank, hidden),
            "attn_q_a_norm": (self.q_rank,),
            "attn_q_b": (self.num_heads * self.key_dim, self.q_rank),
            "attn_kv_a_mqa": (self.rank, hidden),
            "attn_kv_a_norm": (self.rank,),
            "attn_k_b": (self.num_heads, self.rank, self.key_dim),
            "attn_v_b": (self.num_heads, self.value_dim, self.rank),
            "attn_output": (hidden, self.num_heads * self.value_dim),
        }
        if has_indexer:
            names |= {
                "indexer.attn_q_b": (self.index_heads * self.index_dim, self.q_rank),
                "indexer.attn_k": (self.index_dim, hidden),
                "indexer.k_norm": (self.index_dim,),
                "indexer.proj": (self.index_heads, hidden),
                "indexer_compressor_gate": (self.index_dim, hidden),
                "indexer_compressor_ape": (self.ratio, self.index_dim),
            }
        shapes: Shapes = {f"{name}.weight": sizes for name, sizes in names.items()}
        return shapes | ({"indexer.k_norm.bias": (self.index_dim,)} if has_indexer else {})


def read_pooled(header: HeaderReader) -> PooledShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    rank, name = header.count("attention.kv_lora_rank"), header.architecture
    for key in ("attention.key_length", "attention.value_length"):
        said = header.count(key, rank)
        if said != rank:
            header.problems.append(f"metadata key {name}.{key} is {said}: without rotation it must be the rank {rank}")
    ratio, budget = header.count("attention.indexer.kpool"), header.count("attention.indexer.top_k")
    if ratio < 2 or budget % ratio:
        header.problems.append(
            f"metadata key {name}.attention.indexer.kpool is {ratio}: it must be above 1 and divide the "
            f"{budget} of attention.indexer.top_k"
        )
    return PooledShape(
        num_heads=header.one_count("attention.head_count"),
        q_rank=header.count("attention.q_lora_rank"),
        rank=rank,
        key_dim=header.count("attention.key_length_mla"),
        value_dim=header.count("attention.value_length_mla"),
        index_heads=header.count("attention.indexer.head_count"),
        index_dim=header.count("attention.indexer.key_length"),
        index_eps=header.positive("attention.layer_norm_epsilon", NORM_EPS),
        ratio=ratio,
        num_best=budget // ratio,
    )


def read_indexers(header: HeaderReader, has_attention: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers pick for themselves: all with attention, or those of `attention.indexer.types`.

    A layer that does not attends what the last one before it has picked.
    """
    name = f"{header.architecture}.attention.indexer.types"
    types = header.metadata.get(name)
    if types is None:
        return has_attention
    is_told = is_list(types) and len(types) >= len(has_attention) and all(kind in (0, 1) for kind in types)
    own = tuple(bool(kind) and attends for kind, attends in zip(types, has_attention, strict=False)) if is_told else ()
    first = has_attention.index(True) if True in has_attention else 0
    if not is_told or not own[first]:
        header.problems.append(
            f"metadata key {name} is {short(types)}: it must say true or false for each layer, and true for the first "
            "with attention"
        )
        return has_attention
    return own


@dataclass(frozen=True)
class PoolIndexer:
    """What picks a layer's pools. place: its own among the indexers' caches."""

    q: Projection
    k: Projection
    k_norm: Norm
    k_bias: Tensor
    gates: Projection
    weights: Projection
    pools: Compressor
    spec: IndexerSpec
    place: int

    def select(
        self, y: Tensor, source: Tensor, ops: Ops, batch: ForwardBatch, keys: KVCache, unfinished: States
    ) -> Selection:
        """Which tokens each row attends, pools that end in this step written first; source: what queries are made of.

        Scales of scores choose nothing.
        """
        key, gates, weights = ops.project(y, self.k, self.gates, self.weights)
        key = ops.layer_norm(key, self.k_norm, self.k_bias)
        ops.compress(key, gates, unfinished, self.place, keys, self.place, batch, self.pools)
        [q] = ops.project(source, self.q)
        return ops.select_pools(q, weights, keys, self.place, batch, self.spec)


@dataclass(frozen=True)
class PooledAttention:
    """One layer's attention. place: its own among the latents."""

    q_a: Projection
    q_a_norm: Norm
    q: Projection
    latent: Projection
    latent_norm: Norm
    into_latent: Weight
    """[heads, rank, key_dim]"""
    out_of_latent: Weight
    """[heads, value_dim, rank]"""
    output: Projection
    indexer: PoolIndexer | None
    spec: LatentAttentionSpec
    place: int

    def of(
        self,
        y: Tensor,
        ops: Ops,
        batch: ForwardBatch,
        caches: tuple[KVCache, KVCache, States],
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        """What attention makes of normed rows, [tokens, hidden] → the same; and what was attended.

        caches: as `PooledShape.caches` has them; selection: what the last such layer attended.
        """
        latents, keys, unfinished = caches
        down, latent = ops.project(y, self.q_a, self.latent)
        source = ops.rms_norm(down, self.q_a_norm)
        if self.indexer is not None:
            selection = self.indexer.select(y, source, ops, batch, keys, unfinished)
        ops.store_latent(latents, self.place, batch, ops.rms_norm(latent, self.latent_norm))
        q = ops.project_heads(ops.project(source, self.q)[0], self.into_latent)
        none = ops.columns(q, 0, 0)
        found = ops.latent_attention(q, none, latents, self.place, batch, self.spec, selection)
        return ops.project(ops.project_heads(found, self.out_of_latent), self.output)[0], selection


def bind_pooled(bind: Binder, block: str, shape: PooledShape, place: int, indexer: int | None) -> PooledAttention:
    """The attention of a block such as `blk.3.`; indexer: which of the indexers it has, None for none."""
    return PooledAttention(
        q_a=bind.projection(f"{block}attn_q_a"),
        q_a_norm=bind.norm(f"{block}attn_q_a_norm"),
        q=bind.projection(f"{block}attn_q_b"),
        latent=bind.projection(f"{block}attn_kv_a_mqa"),
        latent_norm=bind.norm(f"{block}attn_kv_a_norm"),
        into_latent=bind.experts(f"{block}attn_k_b"),
        out_of_latent=bind.experts(f"{block}attn_v_b"),
        output=bind.projection(f"{block}attn_output"),
        indexer=None if indexer is None else bind_indexer(bind, block, shape, indexer),
        spec=LatentAttentionSpec(shape.num_heads, shape.rank, 0, shape.key_dim**-0.5),
        place=place,
    )


def bind_indexer(bind: Binder, block: str, shape: PooledShape, place: int) -> PoolIndexer:
    """The indexer of a block such as `blk.3.`."""
    position = bind.vector(f"{block}indexer_compressor_ape.weight")
    return PoolIndexer(
        q=bind.projection(f"{block}indexer.attn_q_b"),
        k=bind.projection(f"{block}indexer.attn_k"),
        k_norm=Norm(bind.vector(f"{block}indexer.k_norm.weight"), shape.index_eps),
        k_bias=bind.vector(f"{block}indexer.k_norm.bias"),
        gates=bind.projection(f"{block}indexer_compressor_gate"),
        weights=bind.projection(f"{block}indexer.proj"),
        pools=Compressor(shape.ratio, shape.index_dim, overlaps=False, position=position),
        spec=IndexerSpec(shape.index_heads, shape.index_dim, shape.num_best),
        place=place,
    )
