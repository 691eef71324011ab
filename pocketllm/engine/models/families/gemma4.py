"""gemma4: local and global layers with heads of different sizes, and an input of its own for every layer.

Google DeepMind 2026, "Gemma 4". Scores are not scaled; values are normed like queries and keys, without a weight. The
last layers may read the keys and values of the last one of their kind that has its own. Norms are stored as they are.
In the mixture, experts stand beside every layer's feed-forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    Windows,
    bad_rotation,
    bad_vocabulary,
    context_length,
    family_unmet,
    read_windows,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, KVSpec, ModelCapability, SeveralCaches
from pocketllm.engine.models.header import HeaderReader, misfit, short
from pocketllm.engine.models.parts.mixtures.scaled_experts import (
    SCALED_EXPERTS_OPS,
    ScaledExpertsShape,
    ScaledMixture,
    bind_scaled_mixture,
    read_scaled_experts,
    with_halves_as_named,
)
from pocketllm.engine.models.parts.own_inputs import (
    Inputs,
    OwnInput,
    bind_inputs,
    bind_own_input,
    own_input_shapes,
)
from pocketllm.engine.models.rope import RopeSpec, inverse_frequencies, read_rope

ARCHITECTURE = "gemma4"
SUPPORTED = ("attention.sliding_window", "final_logit_softcapping", "expert_count")
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key not in SUPPORTED} | {"expert_gating_func": 1}


@dataclass(frozen=True)
class Heads:
    """Of the local layers, or of the global ones."""

    num_kv_heads: int
    dim: int
    rope: RopeSpec


@dataclass(frozen=True)
class Gemma4Shape:
    """Every size of one checkpoint, from its header."""

    num_layers: int
    hidden: int
    num_heads: int
    eps: float
    vocab_size: int
    windows: Windows
    local: Heads
    everywhere: Heads
    intermediates: tuple[int, ...]
    """Of each layer's feed-forward."""
    num_owners: int
    """Layers with keys and values of their own; the others come last."""
    own_width: int
    """Of each layer's own input; 0: there is none."""
    experts: ScaledExpertsShape | None
    logit_cap: float | None

    def is_local(self, layer: int) -> bool:
        return self.windows.of(layer) is not None

    def heads(self, layer: int) -> Heads:
        return self.local if self.is_local(layer) else self.everywhere

    def owners(self, is_local: bool) -> list[int]:
        """Layers of a kind that write keys and values."""
        return [layer for layer in range(self.num_owners) if self.is_local(layer) is is_local]

    def place(self, layer: int) -> int:
        """Which of its kind's caches a layer reads: its own, or the last one that is written."""
        owners = self.owners(self.is_local(layer))
        return owners.index(layer) if layer < self.num_owners else len(owners) - 1

    @property
    def cache(self) -> CacheSpec:
        """Local layers' keys and values, then global ones'."""
        kinds = (self.owners(True), self.local, self.windows.size), (self.owners(False), self.everywhere, None)
        parts = (KVSpec(len(own), kind.num_kv_heads, kind.dim, kind.dim, window) for own, kind, window in kinds)
        return SeveralCaches(tuple(parts))


def read_shape(header: HeaderReader, vocab_size: int = 0) -> Gemma4Shape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    num_layers, context = header.num_layers(), header.count("context_length")
    windows = read_windows(header, num_layers, period=6)
    counts = header.counts("attention.head_count_kv", num_layers)
    is_local = [windows.of(layer) is not None for layer in range(len(counts))]
    dim = header.count("attention.key_length")
    local_dim = header.count("attention.key_length_swa", dim)
    rope = read_rope(header, header.count("rope.dimension_count", dim), context)
    local_rope = replace(
        rope,
        dim=header.count("rope.dimension_count_swa", local_dim),
        theta=header.positive("rope.freq_base_swa", 10000.0),
        scaling="none",
    )
    return Gemma4Shape(
        num_layers=num_layers,
        hidden=header.count("embedding_length"),
        num_heads=header.one_count("attention.head_count"),
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        vocab_size=vocab_size,
        windows=windows,
        local=Heads(one_of(header, counts, is_local, True), local_dim, local_rope),
        everywhere=Heads(one_of(header, counts, is_local, False), dim, rope),
        intermediates=header.counts("feed_forward_length", num_layers),
        num_owners=num_layers - header.count_or_none("attention.shared_kv_layers"),
        own_width=header.count_or_none("embedding_length_per_layer_input"),
        experts=read_scaled_experts(header),
        logit_cap=header.positive_or_none("final_logit_softcapping"),
    )


def one_of(header: HeaderReader, counts: Sequence[int], is_local: Sequence[bool], wanted: bool) -> int:
    """The number of key heads of all layers of a kind; 1 where there is no such layer."""
    found = {count for count, local in zip(counts, is_local, strict=True) if local is wanted}
    if len(found) > 1:
        header.problems.append(
            f"metadata key {ARCHITECTURE}.attention.head_count_kv is {short(counts)}: layers of a kind must have one"
        )
    return max(found, default=1)


def tensor_shapes(shape: Gemma4Shape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    table = (shape.vocab_size, shape.hidden)
    needed: Shapes = {"token_embd.weight": table, "output_norm.weight": (shape.hidden,)}
    optional: Shapes = {"output.weight": table, "rope_freqs.weight": (shape.everywhere.rope.dim // 2,)}
    inputs, own_inputs = own_input_shapes(shape.num_layers, shape.own_width, shape.hidden, shape.vocab_size)
    experts, scales = ({}, {}) if shape.experts is None else shape.experts.tensors(shape.hidden)
    needed |= inputs
    for number in range(shape.num_layers):
        own, more = layer_shapes(shape, number)
        needed |= {f"blk.{number}.{name}.weight": rows for name, rows in (own | own_inputs).items()}
        needed |= {f"blk.{number}.{name}": rows for name, rows in experts.items()}
        optional |= {f"blk.{number}.{name}": rows for name, rows in scales.items()}
        optional |= {f"blk.{number}.{name}.weight": rows for name, rows in more.items()}
    return needed, optional


def layer_shapes(shape: Gemma4Shape, number: int) -> tuple[Shapes, Shapes]:
    """Tensors of a layer by name without `.weight`, and those it may have."""
    heads, hidden, inner = shape.heads(number), shape.hidden, (shape.intermediates[number], shape.hidden)
    query, key = shape.num_heads * heads.dim, (heads.num_kv_heads * heads.dim, hidden)
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    needed: Shapes = dict.fromkeys(names, (hidden,))
    needed |= {"attn_q": (query, hidden), "attn_q_norm": (heads.dim,), "attn_output": (hidden, query)}
    needed |= {"ffn_gate": inner, "ffn_up": inner, "ffn_down": inner[::-1]}
    optional: Shapes = {"layer_output_scale": (1,)}
    # a layer that reads others' keys may still have its own, unused; a global one may take its keys for values
    owned: Shapes = {"attn_k": key, "attn_k_norm": (heads.dim,)}
    is_owner = number < shape.num_owners
    (needed if is_owner else optional).update(owned)
    (needed if is_owner and shape.is_local(number) else optional)["attn_v"] = key
    return needed, optional


@dataclass(frozen=True)
class Keys:
    """How a layer makes keys and values of its own."""

    k: Projection
    v: Projection | None
    """None: the keys before their norm."""
    k_norm: Norm
    v_norm: Norm


@dataclass(frozen=True)
class Layer:
    """One block's weights and what it sees."""

    attn_norm: Norm
    q: Projection
    q_norm: Norm
    keys: Keys | None
    """None: it reads those of an earlier layer."""
    output: Projection
    post_attention_norm: Norm
    ffn_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    mixture: ScaledMixture | None
    post_ffw_norm: Norm
    own: OwnInput | None
    scale: float
    attention: AttentionSpec
    place: int


@dataclass(frozen=True)
class Gemma4Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    hidden: int
    embedding: Weight
    inputs: Inputs | None
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    global_freq: Tensor
    local_freq: Tensor
    logit_cap: float | None
    kv_spec: CacheSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops, (nearby_cache, global_cache) = self.ops, cache
        x = ops.embed(self.embedding, batch.input_ids, scale=self.hidden**0.5)
        inputs = None if self.inputs is None else self.inputs.of(x, ops, batch)
        everywhere = ops.rope_angles(self.global_freq, batch.positions, 1.0)
        nearby = ops.rope_angles(self.local_freq, batch.positions, 1.0)
        for layer in self.layers:
            is_local = layer.attention.window is not None
            angles, kept = (nearby, nearby_cache) if is_local else (everywhere, global_cache)
            x = ops.add(x, ops.rms_norm(self.attend(layer, x, angles, batch, kept), layer.post_attention_norm))
            x = ops.add(x, ops.rms_norm(self.feed_forward(layer, x), layer.post_ffw_norm))
            if layer.own is not None:
                x = layer.own.add_to(x, ops, inputs)
            if layer.scale != 1.0:
                x = ops.scale(x, layer.scale)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(self, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The attention half of a block: [tokens, hidden] → the same."""
        ops, head_dim, keys = self.ops, layer.attention.head_dim, layer.keys
        parts = [layer.q] if keys is None else [layer.q, keys.k, *([keys.v] if keys.v is not None else [])]
        q, *made = ops.project(x, *parts, norm=layer.attn_norm)
        q = ops.rope(ops.rms_norm(q, layer.q_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
        if keys is not None:
            k = ops.rope(ops.rms_norm(made[0], keys.k_norm), angles, head_dim, RopeLayout.HALF_SPLIT)
            ops.store_kv(cache, layer.place, k, ops.rms_norm(made[-1], keys.v_norm), batch)
        return ops.project(ops.attention(q, cache, layer.place, batch, layer.attention), layer.output)[0]

    def feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """down(gelu(gate x) · up x), x normed first, and the experts beside it: [tokens, hidden] → the same."""
        gate, up = self.ops.project(x, layer.gate, layer.up, norm=layer.ffn_norm)
        [made] = self.ops.project(self.ops.gelu_mul(gate, up), layer.down)
        return made if layer.mixture is None else layer.mixture.beside(made, x, self.ops)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        logits = self.ops.to_numpy(self.ops.project(hidden, self.head)[0])
        return logits if self.logit_cap is None else self.logit_cap * np.tanh(logits / self.logit_cap)


class Gemma4Family:
    """How a gemma4 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=DENSE_OPS | {"gelu_mul", "add", "scale", "columns"},
        ops_of_keys={"expert_count": SCALED_EXPERTS_OPS},
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return usable(read_shape, metadata, ARCHITECTURE).cache

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        return family_unmet(checkpoint, header, shape.num_layers, NEUTRAL, lambda: misfits(checkpoint, shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Gemma4Model:
        shape = usable(partial(read_shape, vocab_size=vocab_rows(checkpoint)), checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        divisors = checkpoint.values("rope_freqs.weight") if "rope_freqs.weight" in checkpoint.tensors else None
        return Gemma4Model(
            ops=ops,
            hidden=shape.hidden,
            embedding=embedding,
            inputs=bind_inputs(bind, shape.own_width, shape.hidden) if shape.own_width else None,
            layers=[bind_layer(bind, shape, number) for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            global_freq=ops.load_vector(inverse_frequencies(shape.everywhere.rope, divisors)),
            local_freq=ops.load_vector(inverse_frequencies(shape.local.rope)),
            logit_cap=shape.logit_cap,
            kv_spec=shape.cache,
            vocab_size=shape.vocab_size,
        )


def misfits(checkpoint: Checkpoint, shape: Gemma4Shape) -> list[str]:
    """Sizes that do not go together, and tensors that do not fit."""
    reasons = bad_vocabulary(checkpoint.metadata, shape.vocab_size)
    for kind in (shape.local, shape.everywhere):
        reasons += bad_rotation(ARCHITECTURE, kind.rope, kind.dim)
        if shape.num_heads % kind.num_kv_heads:
            reasons.append(f"{shape.num_heads} query heads cannot share {kind.num_kv_heads} key heads evenly")
    if any(not shape.owners(shape.is_local(layer)) for layer in range(shape.num_layers)):
        reasons.append(f"a layer shares keys that none has ({ARCHITECTURE}.attention.shared_kv_layers)")
    needed, optional = tensor_shapes(shape)
    return reasons or misfit(checkpoint, with_halves_as_named(checkpoint.tensors, needed), optional)


def bind_layer(bind: Binder, shape: Gemma4Shape, number: int) -> Layer:
    """One block's weights and what it sees."""
    block, heads = f"blk.{number}.", shape.heads(number)
    scale = f"{block}layer_output_scale.weight"
    return Layer(
        attn_norm=bind.norm(f"{block}attn_norm"),
        q=bind.projection(f"{block}attn_q"),
        q_norm=bind.norm(f"{block}attn_q_norm"),
        keys=bind_keys(bind, block, heads) if number < shape.num_owners else None,
        output=bind.projection(f"{block}attn_output"),
        post_attention_norm=bind.norm(f"{block}post_attention_norm"),
        ffn_norm=bind.norm(f"{block}ffn_norm"),
        gate=bind.projection(f"{block}ffn_gate"),
        up=bind.projection(f"{block}ffn_up"),
        down=bind.projection(f"{block}ffn_down"),
        mixture=None if shape.experts is None else bind_scaled_mixture(bind, block, shape.experts),
        post_ffw_norm=bind.norm(f"{block}post_ffw_norm"),
        own=bind_own_input(bind, number, shape.own_width) if shape.own_width else None,
        scale=float(bind.checkpoint.values(scale)[0]) if scale in bind.checkpoint.tensors else 1.0,
        attention=AttentionSpec(shape.num_heads, heads.num_kv_heads, heads.dim, 1.0, shape.windows.of(number)),
        place=shape.place(number),
    )


def bind_keys(bind: Binder, block: str, heads: Heads) -> Keys:
    """How a layer makes keys and values."""
    has_values = f"{block}attn_v.weight" in bind.checkpoint.tensors
    return Keys(
        k=bind.projection(f"{block}attn_k"),
        v=bind.projection(f"{block}attn_v") if has_values else None,
        k_norm=bind.norm(f"{block}attn_k_norm"),
        v_norm=Norm(bind.ops.load_vector(np.ones(heads.dim, np.float32)), bind.eps),
    )


FAMILY = Gemma4Family()
