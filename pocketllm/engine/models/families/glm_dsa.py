"""glm-dsa: GLM 5: latent attention over the tokens that an indexer picks, and experts as in DeepSeek V3.

DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv 2512.02556) for the indexer; "IndexCache" (arXiv 2603.12201) for layers that
attend what the indexer of a layer before them has picked. Neighboring values rotate together, in the indexer too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.ops import (
    KVCache,
    Norm,
    Ops,
    Projection,
    RopeLayout,
    Selection,
    Tensor,
    Weight,
)
from pocketllm.engine.models.blocks import (
    Binder,
    Shapes,
    SwiGLU,
    context_length,
    family_unmet,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import Checkpoint, LatentSpec, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader, is_list, short
from pocketllm.engine.models.parts.attention.latent import (
    LATENT_OPS,
    NEUTRAL,
    LatentAttention,
    LatentShape,
    bind_attention,
    decoder_shapes,
    misfits,
    read_latent_shape,
)
from pocketllm.engine.models.parts.mixtures.experts import Mixture, bind_mixture
from pocketllm.engine.models.rope import inverse_frequencies

ARCHITECTURE = "glm-dsa"
INDEXER_EPS = 1e-6
"""Of the norm of an indexer's keys; no key tells it."""


@dataclass(frozen=True)
class GlmDsaShape:
    """Sizes of the decoder, and of the indexers."""

    decoder: LatentShape
    index_heads: int
    index_dim: int
    top_k: int
    own_indexer: tuple[bool, ...] | None
    """For each layer, whether it picks for itself, or attends what the last one before it picked; None: all pick."""

    def picks(self, layer: int) -> bool:
        """Whether a layer has an indexer; one that predicts further tokens has."""
        return self.own_indexer is None or layer >= len(self.own_indexer) or self.own_indexer[layer]

    @property
    def kv(self) -> SeveralCaches:
        num_indexers = self.decoder.num_layers if self.own_indexer is None else sum(self.own_indexer)
        return SeveralCaches((self.decoder.kv, LatentSpec(num_indexers, self.index_dim)))


def read_shape(header: HeaderReader, vocab_size: int = 0) -> GlmDsaShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    decoder = read_latent_shape(header, vocab_size)
    return GlmDsaShape(
        decoder=decoder,
        index_heads=header.count("attention.indexer.head_count"),
        index_dim=header.count("attention.indexer.key_length"),
        top_k=header.count("attention.indexer.top_k"),
        own_indexer=read_own_indexer(header, decoder.num_layers),
    )


def read_own_indexer(header: HeaderReader, num_layers: int) -> tuple[bool, ...] | None:
    """`attention.indexer.types`: true or false for each layer, the first one true; None where it is absent."""
    name = f"{ARCHITECTURE}.attention.indexer.types"
    types = header.metadata.get(name)
    if types is None:
        return None
    fits = is_list(types) and len(types) >= num_layers and all(kind in (0, 1) for kind in types)
    if not fits or not types[0]:
        header.problems.append(
            f"metadata key {name} is {short(types)}: it must say true or false for each layer, and true for the first"
        )
        return None
    return tuple(bool(kind) for kind in types[:num_layers])


def tensor_shapes(shape: GlmDsaShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    decoder, size = shape.decoder, shape.index_dim
    indexer: Shapes = {
        "indexer.attn_q_b.weight": (shape.index_heads * size, decoder.q_rank),
        "indexer.attn_k.weight": (size, decoder.hidden),
        "indexer.k_norm.weight": (size,),
        "indexer.k_norm.bias": (size,),
        "indexer.proj.weight": (shape.index_heads, decoder.hidden),
    }
    return decoder_shapes(decoder, lambda number: indexer if shape.picks(number) else {})


@dataclass(frozen=True)
class Indexer:
    """What picks a layer's keys. number: of the cache's layers, its own."""

    number: int
    q: Projection
    k: Projection
    k_norm: Norm
    k_bias: Tensor
    weights: Projection
    spec: IndexerSpec


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attention: LatentAttention
    indexer: Indexer | None
    feed_forward: SwiGLU | Mixture


@dataclass(frozen=True)
class GlmDsaModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: SeveralCaches
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        latents, index_keys = cache
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        selection = None
        for number, layer in enumerate(self.layers):
            attention = layer.attention
            compressed = attention.compress(x, ops)
            if layer.indexer is not None:
                selection = self.select(layer.indexer, attention, x, compressed[0], angles, batch, index_keys)
            found = attention.attend(number, compressed, angles, batch, latents, ops, selection)
            x = ops.project_add(found, attention.output, x)
            x = layer.feed_forward.add_to(x, ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def select(
        self,
        indexer: Indexer,
        attention: LatentAttention,
        x: Tensor,
        source: Tensor,
        angles: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
    ) -> Selection:
        """Which keys each row attends, this step's index keys written first; source: what queries are made of."""
        ops, dim = self.ops, indexer.spec.dim
        [q] = ops.project(source, indexer.q, norm=attention.query_norm)
        key, weights = ops.project(x, indexer.k, indexer.weights, norm=attention.norm)
        key = ops.rope(ops.layer_norm(key, indexer.k_norm, indexer.k_bias), angles, dim, RopeLayout.ADJACENT)
        ops.store_latent(cache, indexer.number, batch, key)
        q = ops.rope(q, angles, dim, RopeLayout.ADJACENT)
        return ops.select_keys(q, weights, cache, indexer.number, batch, indexer.spec)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class GlmDsaFamily:
    """How a glm-dsa header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=LATENT_OPS | {"layer_norm", "select_keys"})

    def kv_spec(self, metadata: Mapping[str, Any]) -> SeveralCaches:
        return usable(read_shape, metadata, ARCHITECTURE).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        decoder = shape.decoder
        if decoder.q_rank == 0:
            header.problems.append(f"metadata key {ARCHITECTURE}.attention.q_lora_rank is absent: the indexer needs it")
        return family_unmet(
            checkpoint,
            header,
            decoder.num_layers + decoder.num_nextn,
            NEUTRAL,
            lambda: [*bad_indexer(shape), *misfits(ARCHITECTURE, decoder, checkpoint, lambda: tensor_shapes(shape))],
        )

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> GlmDsaModel:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        decoder = shape.decoder
        bind = Binder(checkpoint, ops, decoder.eps)
        embedding = bind.matrix("token_embd.weight")
        return GlmDsaModel(
            ops=ops,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(decoder.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(decoder.rope)),
            rope_magnitude=decoder.magnitude,
            kv_spec=shape.kv,
            vocab_size=decoder.vocab_size,
        )


def bad_indexer(shape: GlmDsaShape) -> list[str]:
    """Sizes of the indexer that cannot be."""
    if shape.index_dim < shape.decoder.rope_dim:
        return [
            f"{ARCHITECTURE}.attention.indexer.key_length={shape.index_dim} must be at least "
            f"rope.dimension_count={shape.decoder.rope_dim}"
        ]
    return []


def bind_layer(bind: Binder, shape: GlmDsaShape, number: int) -> Layer:
    """One block's weights."""
    block, decoder = f"blk.{number}.", shape.decoder
    is_dense = number < decoder.num_dense
    num_before = sum(map(shape.picks, range(number)))
    return Layer(
        attention=bind_attention(bind, block, decoder),
        indexer=bind_indexer(bind, block, shape, num_before) if shape.picks(number) else None,
        feed_forward=bind.swiglu(block) if is_dense else bind_mixture(bind, block, decoder.mixture),
    )


def bind_indexer(bind: Binder, block: str, shape: GlmDsaShape, number: int) -> Indexer:
    """The indexer of a block such as `blk.0.`."""
    return Indexer(
        number=number,
        q=bind.projection(f"{block}indexer.attn_q_b"),
        k=bind.projection(f"{block}indexer.attn_k"),
        k_norm=Norm(bind.vector(f"{block}indexer.k_norm.weight"), INDEXER_EPS),
        k_bias=bind.vector(f"{block}indexer.k_norm.bias"),
        weights=bind.projection(f"{block}indexer.proj"),
        spec=IndexerSpec(shape.index_heads, shape.index_dim, shape.top_k),
    )


FAMILY = GlmDsaFamily()
