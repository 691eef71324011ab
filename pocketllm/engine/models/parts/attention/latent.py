"""Decoders with multi-head latent attention: their sizes, their tensors' names, and the attention in absorbed form.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434). A token keeps one latent and one rotated key, which all heads share.
Keys and values of heads are never made: a head's query is taken into the latent's space, and its result out of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch, LatentAttentionSpec
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Selection, Tensor, Weight
from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    Shapes,
    bad_rotation,
    bad_vocabulary,
)
from pocketllm.engine.models.contract import Checkpoint, LatentSpec
from pocketllm.engine.models.header import NEXTN, HeaderReader, misfit, short
from pocketllm.engine.models.parts.mixtures.experts import MIXTURE_OPS, MixtureShape, mixture_shapes, read_mixture
from pocketllm.engine.models.rope import RopeSpec, read_rope, rope_magnitude

LATENT_OPS = (DENSE_OPS - {"new_kv_cache", "store_kv", "attention"}) | MIXTURE_OPS | {
    "new_latent_cache", "store_latent", "latent_attention", "project_heads"
}  # fmt: skip
"""Operations that such a decoder with experts needs."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
NEUTRAL: Mapping[str, Any] = {
    key: value for key, value in NEUTRAL_KEYS.items() if key not in ("expert_count", LOG_MULTIPLIER)
}


@dataclass(frozen=True)
class LatentShape:
    """Every size of one checkpoint, from its header."""

    num_layers: int
    """Without those that predict further tokens."""
    num_nextn: int
    """Layers behind the others that predict further tokens; they are not computed."""
    num_dense: int
    """First layers, whose feed-forward is no mixture."""
    hidden: int
    num_heads: int
    q_rank: int
    """0: queries are made of the row itself."""
    rank: int
    """Of the latent."""
    nope_dim: int
    """Values of a head's query and key that do not rotate."""
    rope_dim: int
    value_dim: int
    is_joined: bool
    """Matrices into and out of the latent's space are in one tensor, as files had it before those were split."""
    intermediate: int
    vocab_size: int
    eps: float
    rope: RopeSpec
    log_multiplier: float
    """YaRN: how much scores grow with the logarithm of the factor; 0: it multiplies cos and sin instead."""
    mixture: MixtureShape

    @property
    def kv(self) -> LatentSpec:
        return LatentSpec(self.num_layers, self.rank + self.rope_dim)

    @property
    def scale(self) -> float:
        """What scores are multiplied by: YaRN's (1 + multiplier · ln factor)² over the root of a key's size."""
        grown = 1.0
        if self.rope.scaling == "yarn" and self.rope.factor > 1.0:
            grown += self.log_multiplier * math.log(self.rope.factor)
        return float(grown**2 * (self.nope_dim + self.rope_dim) ** -0.5)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        return rope_magnitude(self.rope, log_multiplier=0.0 if self.log_multiplier else 0.1)


def read_latent_shape(header: HeaderReader, vocab_size: int = 0) -> LatentShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    hidden, rope_dim = header.count("embedding_length"), header.count("rope.dimension_count")
    num_nextn = header.count_or_none(NEXTN)
    is_joined = not header.has("attention.key_length_mla")
    suffix = "" if is_joined else "_mla"
    return LatentShape(
        num_layers=header.num_layers(),
        num_nextn=num_nextn,
        num_dense=header.count_or_none("leading_dense_block_count"),
        hidden=hidden,
        num_heads=header.one_count("attention.head_count"),
        q_rank=header.count_or_none("attention.q_lora_rank"),
        rank=header.count("attention.kv_lora_rank"),
        nope_dim=header.count(f"attention.key_length{suffix}") - rope_dim,
        rope_dim=rope_dim,
        value_dim=header.count(f"attention.value_length{suffix}"),
        is_joined=is_joined,
        intermediate=header.one_count("feed_forward_length"),
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        rope=read_rope(header, rope_dim, header.count("context_length")),
        log_multiplier=read_log_multiplier(header),
        mixture=read_mixture(header, hidden),
    )


def read_log_multiplier(header: HeaderReader) -> float:
    """YaRN's, where it is there and not 0."""
    said = header.metadata.get(f"{header.architecture}.{LOG_MULTIPLIER}", 0.0)
    return 0.0 if said == 0 else header.positive(LOG_MULTIPLIER)


def bad_sizes(family: str, shape: LatentShape, metadata: Mapping[str, Any]) -> list[str]:
    """Sizes that are numbers but do not go together."""
    reasons = [*bad_vocabulary(metadata, shape.vocab_size), *bad_rotation(family, shape.rope, shape.rope_dim)]
    if shape.nope_dim < 1:
        key_dim, name = shape.nope_dim + shape.rope_dim, "key_length" if shape.is_joined else "key_length_mla"
        reasons.append(f"{family}.attention.{name}={key_dim} must be above rope.dimension_count={shape.rope_dim}")
    expected = {"head_count_kv": shape.num_heads if shape.is_joined else 1}
    if not shape.is_joined:
        expected |= {"key_length": shape.rank + shape.rope_dim, "value_length": shape.rank}
    for name, size in expected.items():
        said = metadata.get(f"{family}.attention.{name}", size)
        if said != size:
            reasons.append(f"{family}.attention.{name}={short(said)}, but the header's other sizes make it {size}")
    return reasons


def misfits(
    family: str, shape: LatentShape, checkpoint: Checkpoint, tensor_shapes: Callable[[], tuple[Shapes, Shapes]]
) -> Sequence[str]:
    """Sizes that do not go together, and only where they do, tensors that do not fit."""
    return bad_sizes(family, shape, checkpoint.metadata) or misfit(checkpoint, *tensor_shapes())


# -- tensors ---------------------------------------------------------------------------------------------------------
def decoder_shapes(shape: LatentShape, extra: Callable[[int], Shapes]) -> tuple[Shapes, Shapes]:
    """Tensors by full name with the shape they must have: those a checkpoint needs, and those it may have.

    extra: what a layer needs beside its attention and feed-forward; one that predicts further tokens may have it.
    """
    needed: Shapes = {"token_embd.weight": (shape.vocab_size, shape.hidden), "output_norm.weight": (shape.hidden,)}
    optional: Shapes = {"output.weight": (shape.vocab_size, shape.hidden)}
    experts, chosen = mixture_shapes(shape.mixture)
    for number in range(shape.num_layers + shape.num_nextn):
        is_dense, block = number < shape.num_dense, f"blk.{number}."
        own = attention_shapes(shape) | extra(number) | (dense_shapes(shape) if is_dense else experts)
        more = {} if is_dense else chosen
        if number >= shape.num_layers:
            own, more = {}, own | more | nextn_shapes(shape)
        needed |= {block + name: sizes for name, sizes in own.items()}
        optional |= {block + name: sizes for name, sizes in more.items()}
    return needed, optional


def attention_shapes(shape: LatentShape) -> Shapes:
    """Tensors of a layer's attention, its norm included."""
    queries, hidden = shape.num_heads * (shape.nope_dim + shape.rope_dim), shape.hidden
    names: Shapes = {
        "attn_norm": (hidden,),
        "attn_kv_a_mqa": (shape.rank + shape.rope_dim, hidden),
        "attn_kv_a_norm": (shape.rank,),
        "attn_output": (hidden, shape.num_heads * shape.value_dim),
    }
    if shape.is_joined:
        names["attn_kv_b"] = (shape.num_heads * (shape.nope_dim + shape.value_dim), shape.rank)
    else:
        names["attn_k_b"] = (shape.num_heads, shape.rank, shape.nope_dim)
        names["attn_v_b"] = (shape.num_heads, shape.value_dim, shape.rank)
    if shape.q_rank:
        names |= {"attn_q_a": (shape.q_rank, hidden), "attn_q_a_norm": (shape.q_rank,)}
        names["attn_q_b"] = (queries, shape.q_rank)
    else:
        names["attn_q"] = (queries, hidden)
    return {f"{name}.weight": sizes for name, sizes in names.items()}


def dense_shapes(shape: LatentShape) -> Shapes:
    """Tensors of a feed-forward that is no mixture, its norm included."""
    inner = (shape.intermediate, shape.hidden)
    return {
        "ffn_norm.weight": (shape.hidden,),
        "ffn_gate.weight": inner,
        "ffn_up.weight": inner,
        "ffn_down.weight": (shape.hidden, shape.intermediate),
    }


def nextn_shapes(shape: LatentShape) -> Shapes:
    """What a layer that predicts further tokens has on top."""
    hidden, table = shape.hidden, (shape.vocab_size, shape.hidden)
    names: Shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,)}
    names |= {"shared_head_norm": (hidden,), "embed_tokens": table, "shared_head_head": table}
    return {f"nextn.{name}.weight": sizes for name, sizes in names.items()}


# -- attention -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LatentAttention:
    """A layer's attention behind its norm."""

    norm: Norm
    q_a: Projection | None
    """Into what queries are made of; None: they are made of the normed row."""
    query_norm: Norm
    """Of what queries are made of."""
    q_nope: Projection
    q_rope: Projection
    latent: Projection
    latent_norm: Norm
    key: Projection
    """The rotated key that heads share."""
    into_latent: Weight
    """[heads, rank, nope_dim]"""
    out_of_latent: Weight
    """[heads, value_dim, rank]"""
    output: Projection
    spec: LatentAttentionSpec

    def compress(self, x: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """Of x, not normed yet: what queries are made of, the latent and the key, as they are projected."""
        if self.q_a is None:
            latent, key = ops.project(x, self.latent, self.key, norm=self.norm)
            return x, latent, key
        source, latent, key = ops.project(x, self.q_a, self.latent, self.key, norm=self.norm)
        return source, latent, key

    def attend(
        self,
        layer: int,
        compressed: tuple[Tensor, Tensor, Tensor],
        angles: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        ops: Ops,
        selection: Selection | None = None,
    ) -> Tensor:
        """What heads find, cache written first: [tokens, heads * value_dim]; compressed: as `compress` gave it."""
        source, latent, key = compressed
        q_nope, q_rope = ops.project(source, self.q_nope, self.q_rope, norm=self.query_norm)
        q_rope = ops.rope(q_rope, angles, self.spec.rope_dim, RopeLayout.ADJACENT)
        key = ops.rope(key, angles, self.spec.rope_dim, RopeLayout.ADJACENT)
        ops.store_latent(cache, layer, batch, ops.rms_norm(latent, self.latent_norm), key)
        q_latent = ops.project_heads(q_nope, self.into_latent)
        found = ops.latent_attention(q_latent, q_rope, cache, layer, batch, self.spec, selection)
        return ops.project_heads(found, self.out_of_latent)


def bind_attention(bind: Binder, block: str, shape: LatentShape) -> LatentAttention:
    """The attention of a block such as `blk.0.`. Rows that rotate are kept apart from those that do not."""
    head_dim = shape.nope_dim + shape.rope_dim
    rows = np.arange(shape.num_heads * head_dim).reshape(shape.num_heads, head_dim)
    queries = f"{block}attn_q_b" if shape.q_rank else f"{block}attn_q"
    q_nope, q_rope = bind.rows(queries, rows[:, : shape.nope_dim], rows[:, shape.nope_dim :])
    kept = np.arange(shape.rank + shape.rope_dim)
    latent, key = bind.rows(f"{block}attn_kv_a_mqa", kept[: shape.rank], kept[shape.rank :])
    into_latent, out_of_latent = bind_heads(bind, block, shape)
    norm = bind.norm(f"{block}attn_norm")
    return LatentAttention(
        norm=norm,
        q_a=bind.projection(f"{block}attn_q_a") if shape.q_rank else None,
        query_norm=bind.norm(f"{block}attn_q_a_norm") if shape.q_rank else norm,
        q_nope=q_nope,
        q_rope=q_rope,
        latent=latent,
        latent_norm=bind.norm(f"{block}attn_kv_a_norm"),
        key=key,
        into_latent=into_latent,
        out_of_latent=out_of_latent,
        output=bind.projection(f"{block}attn_output"),
        spec=LatentAttentionSpec(shape.num_heads, shape.rank, shape.rope_dim, shape.scale),
    )


def bind_heads(bind: Binder, block: str, shape: LatentShape) -> tuple[Weight, Weight]:
    """Matrices of heads [heads, rank, nope_dim] into the latent's space, and [heads, value_dim, rank] out of it.

    Of a joined tensor, rows out of the latent are taken as they are packed; those into it are wanted transposed, and so
    they are decoded.
    """
    if not shape.is_joined:
        return bind.experts(f"{block}attn_k_b"), bind.experts(f"{block}attn_v_b")
    name, heads = f"{block}attn_kv_b.weight", (shape.num_heads, shape.nope_dim + shape.value_dim, -1)
    keys = bind.checkpoint.values(name).reshape(heads)[:, : shape.nope_dim].swapaxes(1, 2)
    into_latent = bind.ops.load_experts(np.ascontiguousarray(keys).view(np.uint8).reshape(-1), "F32", keys.shape)
    values = bind.checkpoint.data(name).reshape(heads)[:, shape.nope_dim :]
    sizes = shape.num_heads, shape.value_dim, shape.rank
    quant_type = bind.checkpoint.tensors[name].quant_type
    return into_latent, bind.ops.load_experts(np.ascontiguousarray(values).reshape(-1), quant_type, sizes)
