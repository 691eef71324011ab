"""llama: pre-norm attention with grouped keys, rotary positions, SwiGLU; most small dense models are this.

Touvron et al. 2023 (arXiv 2302.13971, 2307.09288), Ainslie et al. 2023 for grouped queries (arXiv 2305.13245).
In GGUF the rows of q and k are stored so that neighbors (0, 1), (2, 3), … rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, RopeLayout, Tensor, Weight
from pocketllm.engine.models.contract import Checkpoint, KVSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader, is_list, misfit, whole_number
from pocketllm.engine.models.rope import SCALING_TYPES, RopeSpec, inverse_frequencies, read_rope, rope_magnitude

ARCHITECTURE = "llama"

NEUTRAL_KEYS: Mapping[str, Any] = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
    "use_parallel_residual": False,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Keys that would change the computation, with the value at which they do not: another value is refused."""


@dataclass(frozen=True)
class LlamaShape:
    """Every size of one checkpoint, from its header."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    eps: float
    rope: RopeSpec

    @property
    def kv(self) -> KVSpec:
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, self.head_dim)


def read_shape(header: HeaderReader, vocab_size: int = 0) -> LlamaShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    hidden, num_heads = header.count("embedding_length"), header.one_count("attention.head_count")
    head_dim = header.count("attention.key_length", hidden // num_heads)
    return LlamaShape(
        num_layers=header.count("block_count"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=header.one_count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate=header.one_count("feed_forward_length"),
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        rope=read_rope(header, header.count("rope.dimension_count", head_dim), header.count("context_length")),
    )


def usable_shape(metadata: Mapping[str, Any], vocab_size: int = 0) -> LlamaShape:
    """`read_shape`, or GGUFError with every problem."""
    header = HeaderReader(metadata, ARCHITECTURE)
    shape = read_shape(header, vocab_size)
    header.require_clean()
    return shape


def tensor_shapes(shape: LlamaShape) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    hidden, inner = shape.hidden, shape.intermediate
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    needed: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    optional: dict[str, tuple[int, ...]] = {
        "output.weight": (shape.vocab_size, hidden),
        "rope_freqs.weight": (shape.rope.dim // 2,),
    }
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for layer in range(shape.num_layers):
        block = f"blk.{layer}."
        needed[block + "attn_norm.weight"] = needed[block + "ffn_norm.weight"] = (hidden,)
        for name, (rows, columns) in matrices.items():
            needed[f"{block}{name}.weight"] = (rows, columns)
            optional[f"{block}{name}.bias"] = (rows,)
    return needed, optional


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    ffn_norm: Norm
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class LlamaModel:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    shape: LlamaShape
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    attention: AttentionSpec
    kv_spec: KVSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for number, layer in enumerate(self.layers):
            x = self.attend(number, layer, x, angles, batch, cache)
            x = self.feed_forward(layer, x)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def attend(
        self, number: int, layer: Layer, x: Tensor, angles: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """The attention half of a block, cache written first, residual added: [tokens, hidden] → the same."""
        ops, head_dim = self.ops, self.shape.head_dim
        q, k, v = ops.project(x, layer.q, layer.k, layer.v, norm=layer.attn_norm)
        q = ops.rope(q, angles, head_dim, RopeLayout.ADJACENT)
        k = ops.rope(k, angles, head_dim, RopeLayout.ADJACENT)
        ops.store_kv(cache, number, k, v, batch)
        return ops.project_add(ops.attention(q, cache, number, batch, self.attention), layer.output, x)

    def feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        """x + down(silu(gate x) · up x), x normed first: [tokens, hidden] → the same."""
        gate, up = self.ops.project(x, layer.gate, layer.up, norm=layer.ffn_norm)
        return self.ops.project_add(self.ops.silu_mul(gate, up), layer.down, x)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class LlamaFamily:
    """How a llama header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(
        required_ops=frozenset(
            {"load_matrix", "load_vector", "new_kv_cache", "embed", "rms_norm", "project", "project_add", "rope_angles"}
            | {"rope", "store_kv", "attention", "silu_mul", "take", "to_numpy", "synchronize", "capture"}
        )
    )

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        return usable_shape(metadata).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        header = HeaderReader(metadata, ARCHITECTURE)
        length = header.count("context_length")
        header.require_clean()
        return length

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Reasons in the order: keys that cannot be read, features that are not here, tensors that do not fit."""
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_shape(header, vocab_rows(checkpoint))
        reasons = [*header.problems, *header.not_neutral(NEUTRAL_KEYS)]
        scaling = checkpoint.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
        if scaling not in SCALING_TYPES:
            reasons.append(
                f"rope scaling {scaling!r} ({ARCHITECTURE}.rope.scaling.type) is not supported by family llama; "
                f"supported are {', '.join(SCALING_TYPES)}"
            )
        if reasons:
            return reasons
        if shape.num_layers > len(checkpoint.tensors):
            # a count that no file could fill must not be counted up to
            return [f"llama.block_count={shape.num_layers}, but there are {len(checkpoint.tensors)} tensors in all"]
        return [*bad_geometry(shape, checkpoint.metadata), *misfit(checkpoint.tensors, *tensor_shapes(shape))]

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> LlamaModel:
        shape = usable_shape(checkpoint.metadata, vocab_rows(checkpoint))
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        tied = "output.weight" not in checkpoint.tensors
        divisors = checkpoint.values("rope_freqs.weight") if "rope_freqs.weight" in checkpoint.tensors else None
        return LlamaModel(
            ops=ops,
            shape=shape,
            embedding=embedding,
            layers=[bind.layer(f"blk.{number}.") for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm.weight"),
            head=Projection(embedding if tied else bind.matrix("output.weight")),
            inv_freq=ops.load_vector(inverse_frequencies(shape.rope, divisors)),
            rope_magnitude=rope_magnitude(shape.rope),
            attention=AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5),
            kv_spec=shape.kv,
            vocab_size=shape.vocab_size,
        )


@dataclass(frozen=True)
class Binder:
    """Hands a checkpoint's tensors to a backend."""

    checkpoint: Checkpoint
    ops: Ops
    eps: float

    def matrix(self, name: str) -> Weight:
        tensor = self.checkpoint.tensors[name]
        return self.ops.load_matrix(self.checkpoint.data(name), tensor.quant_type, tensor.shape)

    def vector(self, name: str) -> Tensor:
        return self.ops.load_vector(self.checkpoint.values(name))

    def norm(self, name: str) -> Norm:
        return Norm(self.vector(name), self.eps)

    def projection(self, name: str) -> Projection:
        bias = f"{name}.bias"
        return Projection(self.matrix(f"{name}.weight"), self.vector(bias) if bias in self.checkpoint.tensors else None)

    def layer(self, block: str) -> Layer:
        return Layer(
            attn_norm=self.norm(block + "attn_norm.weight"),
            q=self.projection(block + "attn_q"),
            k=self.projection(block + "attn_k"),
            v=self.projection(block + "attn_v"),
            output=self.projection(block + "attn_output"),
            ffn_norm=self.norm(block + "ffn_norm.weight"),
            gate=self.projection(block + "ffn_gate"),
            up=self.projection(block + "ffn_up"),
            down=self.projection(block + "ffn_down"),
        )


def vocab_rows(checkpoint: Checkpoint) -> int:
    """Vocabulary size: rows of the embedding table (or of the head), which the tokenizer need not fill; else 0."""
    for name in ("token_embd.weight", "output.weight"):
        table = checkpoint.tensors.get(name)
        if table is not None and len(table.shape) == 2:
            return int(table.shape[0])
    return 0


def bad_geometry(shape: LlamaShape, metadata: Mapping[str, Any]) -> list[str]:
    """Sizes that are numbers but do not go together."""
    reasons = []
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if is_list(tokens) else 0
    if num_tokens > shape.vocab_size > 0:
        reasons.append(f"the tokenizer has {num_tokens} tokens and token_embd.weight only {shape.vocab_size} rows")
    if shape.rope.theta <= 1.0:
        reasons.append(f"llama.rope.freq_base={shape.rope.theta} must be above 1")
    if shape.num_heads % shape.num_kv_heads:
        reasons.append(
            f"{shape.num_heads} query heads (llama.attention.head_count) cannot share {shape.num_kv_heads} key heads "
            "(llama.attention.head_count_kv) evenly"
        )
    if shape.rope.dim % 2 or shape.rope.dim > shape.head_dim:
        reasons.append(
            f"llama.rope.dimension_count={shape.rope.dim} must be even and at most the head's {shape.head_dim} values"
        )
    value_dim = whole_number(metadata.get("llama.attention.value_length", shape.head_dim))
    if value_dim != shape.head_dim:
        reasons.append(
            f"values of {value_dim} beside keys of {shape.head_dim} (llama.attention.value_length, key_length) are not "
            "supported by family llama"
        )
    return reasons


FAMILY = LlamaFamily()
