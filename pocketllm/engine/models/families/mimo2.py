"""mimo2: local layers with a learned sink between global ones without, and experts after the first layer.

Xiaomi 2026, "MiMo-V2-Flash Technical Report" (arXiv 2601.02780). Local layers see a window, have key heads of their own
number and rotate with a base of their own. Values are smaller than keys and are scaled before they are kept. The two
halves of a head's rotated values rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    SwiGLU,
    Windows,
    bad_rotation,
    bad_vocabulary,
    context_length,
    family_unmet,
    read_windows,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import Checkpoint, KVSpec, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader, is_list, misfit, short, whole_number
from pocketllm.engine.models.parts.mixtures.experts import (
    MIXTURE_OPS,
    Mixture,
    MixtureShape,
    bind_mixture,
    mixture_shapes,
    read_mixture,
)
from pocketllm.engine.models.rope import RopeSpec, inverse_frequencies, read_rope, rope_magnitude

ARCHITECTURE = "mimo2"
HEADS = "attention.head_count_kv"
PATTERN = "attention.sliding_window_pattern"
NEUTRAL = {
    key: value for key, value in NEUTRAL_KEYS.items() if key not in ("expert_count", "attention.sliding_window")
} | {"expert_shared_count": 0}


@dataclass(frozen=True)
class Mimo2Shape:
    """Every size of one checkpoint, from its header."""

    num_layers: int
    num_dense: int
    """First layers, whose feed-forward is no mixture."""
    hidden: int
    num_heads: int
    num_global_heads: int
    """Key heads of a global layer."""
    num_local_heads: int
    key_dim: int
    value_dim: int
    value_scale: float
    intermediate: int
    vocab_size: int
    eps: float
    windows: Windows
    rope: RopeSpec
    local_theta: float
    mixture: MixtureShape

    def is_local(self, layer: int) -> bool:
        return self.windows.of(layer) is not None

    def num_kv_heads(self, layer: int) -> int:
        return self.num_local_heads if self.is_local(layer) else self.num_global_heads

    @property
    def kv(self) -> SeveralCaches:
        """Global layers, then local ones."""
        everywhere = KVSpec(self.num_layers, self.num_global_heads, self.key_dim, self.value_dim)
        return self.windows.caches(everywhere, replace(everywhere, num_kv_heads=self.num_local_heads))


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Mimo2Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_layers, hidden = header.num_layers(), header.count("embedding_length")
    if not is_list(header.metadata.get(f"{ARCHITECTURE}.{PATTERN}")):
        header.problems.append(f"metadata key {ARCHITECTURE}.{PATTERN} must say true or false for each layer")
    windows = read_windows(header, num_layers, period=1)
    key_dim = header.count("attention.key_length")
    num_global, num_local = read_kv_heads(header, windows, num_layers)
    return Mimo2Shape(
        num_layers=num_layers,
        num_dense=header.count("leading_dense_block_count", 1),
        hidden=hidden,
        num_heads=header.one_count("attention.head_count"),
        num_global_heads=num_global,
        num_local_heads=num_local,
        key_dim=key_dim,
        value_dim=header.count("attention.value_length"),
        value_scale=header.positive("attention.value_scale", 1.0),
        intermediate=header.one_count("feed_forward_length"),
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        windows=windows,
        rope=read_rope(header, header.count("rope.dimension_count", key_dim), header.count("context_length")),
        local_theta=header.positive("rope.freq_base_swa", 10000.0),
        mixture=read_mixture(header, hidden, normalized=True),
    )


def read_kv_heads(header: HeaderReader, windows: Windows, num_layers: int) -> tuple[int, int]:
    """Key heads of global and of local layers, from one number for all or one a layer."""
    said = header.metadata.get(f"{ARCHITECTURE}.{HEADS}")
    if not is_list(said) or header.problems:
        both = header.one_count(HEADS)
        return both, both
    counts = [whole_number(count) or 0 for count in header.of_layers(said, num_layers)]
    found: list[set[int]] = [set(), set()]
    for layer, count in enumerate(counts[:num_layers]):
        found[windows.of(layer) is not None].add(count)
    if len(counts) != num_layers or any(len(kind) > 1 for kind in found) or min(counts) < 1:
        header.problems.append(
            f"metadata key {ARCHITECTURE}.{HEADS} is {short(said)}: it must be a whole number above 0 for each layer, "
            "the same for all global and for all local ones"
        )
        return 1, 1
    num_global, num_local = (max(kind, default=1) for kind in found)
    return num_global, num_local


def tensor_shapes(shape: Mimo2Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    needed: Shapes = {"token_embd.weight": (shape.vocab_size, shape.hidden), "output_norm.weight": (shape.hidden,)}
    optional: Shapes = {"output.weight": (shape.vocab_size, shape.hidden)}
    experts, chosen = mixture_shapes(shape.mixture)
    for number in range(shape.num_layers):
        is_dense, block = number < shape.num_dense, f"blk.{number}."
        own = attention_shapes(shape, number) | (dense_shapes(shape) if is_dense else experts)
        needed |= {block + name: sizes for name, sizes in own.items()}
        optional |= {block + name: sizes for name, sizes in ({} if is_dense else chosen).items()}
    return needed, optional


def attention_shapes(shape: Mimo2Shape, layer: int) -> Shapes:
    """Tensors of a layer's attention, its norm included."""
    kv_heads, hidden = shape.num_kv_heads(layer), shape.hidden
    names: Shapes = {
        "attn_norm": (hidden,),
        "attn_q": (shape.num_heads * shape.key_dim, hidden),
        "attn_k": (kv_heads * shape.key_dim, hidden),
        "attn_v": (kv_heads * shape.value_dim, hidden),
        "attn_output": (hidden, shape.num_heads * shape.value_dim),
    }
    if shape.is_local(layer):
        names["attn_sinks"] = (shape.num_heads,)
    return {f"{name}.weight": sizes for name, sizes in names.items()}


def dense_shapes(shape: Mimo2Shape) -> Shapes:
    """Tensors of a feed-forward that is no mixture, its norm included."""
    inner = (shape.intermediate, shape.hidden)
    return {
        "ffn_norm.weight": (shape.hidden,),
        "ffn_gate.weight": inner,
        "ffn_up.weight": inner,
        "ffn_down.weight": (shape.hidden, shape.intermediate),
    }


def bad_sizes(shape: Mimo2Shape, metadata: Mapping[str, Any]) -> list[str]:
    """Sizes that are numbers but do not go together."""
    return [
        *bad_vocabulary(metadata, shape.vocab_size),
        *bad_rotation(ARCHITECTURE, shape.rope, shape.key_dim),
        *(
            f"{shape.num_heads} query heads ({ARCHITECTURE}.attention.head_count) cannot share {kv_heads} key heads "
            f"({ARCHITECTURE}.{HEADS}) evenly"
            for kv_heads in sorted({shape.num_global_heads, shape.num_local_heads})
            if shape.num_heads % kv_heads
        ),
    ]


@dataclass(frozen=True)
class Layer:
    """One block's weights. number: of its cache's layers."""

    number: int
    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    sinks: Tensor | None
    """[heads]; a global layer has none."""
    attention: AttentionSpec
    feed_forward: SwiGLU | Mixture


@dataclass(frozen=True)
class Mimo2Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    shape: Mimo2Shape
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    global_freq: Tensor
    local_freq: Tensor
    global_magnitude: float
    kv_spec: SeveralCaches
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        of_global, of_local = cache[0], cache[-1]
        x = ops.embed(self.embedding, batch.input_ids)
        everywhere = ops.rope_angles(self.global_freq, batch.positions, self.global_magnitude)
        nearby = ops.rope_angles(self.local_freq, batch.positions, 1.0)
        for layer in self.layers:
            is_global = layer.sinks is None
            found = self.attend(
                layer, x, everywhere if is_global else nearby, batch, of_global if is_global else of_local
            )
            x = ops.project_add(found, layer.output, x)
            x = layer.feed_forward.add_to(x, ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(self, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """What heads find, cache written first: [tokens, heads * value_dim]."""
        ops, key_dim = self.ops, self.shape.key_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        q = ops.rope(q, angles, key_dim, RopeLayout.HALF_SPLIT)
        k = ops.rope(k, angles, key_dim, RopeLayout.HALF_SPLIT)
        ops.store_kv(cache, layer.number, k, ops.scale(v, self.shape.value_scale), batch)
        if layer.sinks is None:
            return ops.attention(q, cache, layer.number, batch, layer.attention)
        return ops.sink_attention(q, layer.sinks, cache, layer.number, batch, layer.attention)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class Mimo2Family:
    """How a mimo2 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=DENSE_OPS | MIXTURE_OPS | {"sink_attention", "scale"})

    def kv_spec(self, metadata: Mapping[str, Any]) -> SeveralCaches:
        return usable(read_shape, metadata, ARCHITECTURE).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return family_unmet(
            checkpoint,
            header,
            shape.num_layers,
            NEUTRAL,
            lambda: [*bad_sizes(shape, checkpoint.metadata), *misfit(checkpoint, *tensor_shapes(shape))],
        )

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Mimo2Model:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        local_rope = replace(shape.rope, theta=shape.local_theta, scaling="none")
        return Mimo2Model(
            ops=ops,
            shape=shape,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            global_freq=ops.load_vector(inverse_frequencies(shape.rope)),
            local_freq=ops.load_vector(inverse_frequencies(local_rope)),
            global_magnitude=rope_magnitude(shape.rope),
            kv_spec=shape.kv,
            vocab_size=shape.vocab_size,
        )


def bind_layer(bind: Binder, shape: Mimo2Shape, number: int) -> Layer:
    """One block's weights and what it sees."""
    block, is_local = f"blk.{number}.", shape.is_local(number)
    geometry = shape.num_heads, shape.num_kv_heads(number), shape.key_dim
    return Layer(
        number=shape.windows.place(number),
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v"),
        output=bind.projection(f"{block}attn_output"),
        sinks=bind.vector(f"{block}attn_sinks.weight") if is_local else None,
        attention=AttentionSpec(*geometry, shape.key_dim**-0.5, window=shape.windows.of(number)),
        feed_forward=bind.swiglu(block) if number < shape.num_dense else bind_mixture(bind, block, shape.mixture),
    )


FAMILY = Mimo2Family()
