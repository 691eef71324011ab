"""What three or more families use without a switch: a plain decoder's sizes, its tensors' names, binding, SwiGLU.

A plain decoder has one width, grouped attention of equal heads in every layer, and one gated feed-forward a layer. What
a family adds to that, or does in another order, is in its own file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.models.contract import Checkpoint, KVSpec, SeveralCaches
from pocketllm.engine.models.header import HeaderReader, filled, is_list, misfit, short, whole_number
from pocketllm.engine.models.rope import SCALING_TYPES, RopeSpec, read_rope
from pocketllm.engine.weights.quant_types import BY_NAME

Shapes = dict[str, tuple[int, ...]]
"""Row-major shapes by tensor name."""
Read = TypeVar("Read")

DENSE_OPS = frozenset(
    {"load_matrix", "load_vector", "new_kv_cache", "embed", "rms_norm", "project", "project_add", "rope_angles"}
    | {"rope", "store_kv", "attention", "take", "to_numpy", "synchronize", "capture"}
)
"""Operations that every plain decoder needs; its gate comes on top."""

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
"""Matrix types that are not packed."""
WIDE_BITS = 4
"""Of a weight: from so many on, rows of 16 bits are worth their price."""
NEUTRAL_KEYS: Mapping[str, Any] = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
    "use_parallel_residual": False,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Keys that would change a plain decoder's computation, with the value at which they do not: another is refused."""


@dataclass(frozen=True)
class DenseShape:
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


def read_dense_shape(header: HeaderReader, vocab_size: int = 0, intermediate: int | None = None) -> DenseShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems.

    intermediate: the feed-forward's width where the header need not say it; None: it must.
    """
    hidden, num_heads = header.count("embedding_length"), header.one_count("attention.head_count")
    head_dim = header.count("attention.key_length", hidden // num_heads)
    return DenseShape(
        num_layers=header.num_layers(),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=header.one_count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate=header.one_count("feed_forward_length", intermediate),
        vocab_size=vocab_size,
        eps=header.positive("attention.layer_norm_rms_epsilon"),
        rope=read_rope(header, header.count("rope.dimension_count", head_dim), header.count("context_length")),
    )


@dataclass(frozen=True)
class Windows:
    """Which layers are local: see only the latest tokens, `size` of them with their own."""

    size: int | None
    """None: every layer is global."""
    pattern: int | tuple[bool, ...]
    """Every how many layers the last one is global, or for each layer whether it is local."""

    def of(self, layer: int) -> int | None:
        """The window of a layer; None for a global one."""
        if isinstance(self.pattern, int):
            return self.size if (layer + 1) % self.pattern else None
        return self.size if self.pattern[layer] else None

    def place(self, layer: int) -> int:
        """Which layer of its kind's cache it is: how many before it see as much."""
        return sum(self.of(before) == self.of(layer) for before in range(layer))

    def caches(self, everywhere: KVSpec, local: KVSpec | None = None) -> SeveralCaches:
        """The global layers' cache first and the local layers' last, one cache where all are of a kind.

        everywhere: with the number of all layers; local: the same of a local layer's heads, where they differ.
        """
        num_local = sum(self.of(layer) is not None for layer in range(everywhere.num_layers))
        parts = (
            replace(everywhere, num_layers=everywhere.num_layers - num_local),
            replace(local or everywhere, num_layers=num_local, window=self.size),
        )
        return SeveralCaches(tuple(part for part in parts if part.num_layers))


def read_windows(header: HeaderReader, num_layers: int, period: int, size: int | None = None) -> Windows:
    """`attention.sliding_window` (0 is none) and its pattern; period and size: the family's own where it is silent."""
    said = header.metadata.get(f"{header.architecture}.attention.sliding_window", size or 0)
    size = header.count("attention.sliding_window", size) if said != 0 else None
    name = f"{header.architecture}.attention.sliding_window_pattern"
    pattern = header.metadata.get(name, period)
    if not is_list(pattern):
        return Windows(size, header.count("attention.sliding_window_pattern", period))
    pattern = header.of_layers(pattern, num_layers)
    if len(pattern) != num_layers or any(flag not in (0, 1) for flag in pattern):
        header.problems.append(f"metadata key {name} is {short(pattern)}: it must say true or false for each layer")
        return Windows(None, 1)
    return Windows(size, tuple(bool(flag) for flag in pattern))


def usable(read: Callable[[HeaderReader], Read], metadata: Mapping[str, Any], architecture: str) -> Read:
    """What `read` finds in a header, or GGUFError with every problem."""
    header = HeaderReader(metadata, architecture)
    found = read(header)
    header.require_clean()
    return found


def context_length(header: HeaderReader) -> int:
    """Longest context the checkpoint was made for, in tokens."""
    return header.count("context_length")


def vocab_rows(checkpoint: Checkpoint) -> int:
    """Vocabulary size: rows of the embedding table (or of the head), which the tokenizer need not fill; else 0."""
    for name in ("token_embd.weight", "output.weight"):
        table = checkpoint.tensors.get(name)
        if table is not None and len(table.shape) == 2:
            return int(table.shape[0])
    return 0


# -- why a checkpoint cannot run -------------------------------------------------------------------------------------
def dense_unmet(
    checkpoint: Checkpoint,
    header: HeaderReader,
    shape: DenseShape,
    neutral: Mapping[str, Any],
    tensor_shapes: Callable[[], tuple[Shapes, Shapes]],
) -> Sequence[str]:
    """Reasons in the order: keys that cannot be read, features that are not here, tensors that do not fit.

    header: already read; tensor_shapes: those a checkpoint needs and those it may have, asked for once sizes are sane.
    """
    return family_unmet(
        checkpoint,
        header,
        shape.num_layers,
        neutral,
        lambda: [
            *bad_geometry(header.architecture, shape, checkpoint.metadata),
            *misfit(checkpoint, *tensor_shapes()),
        ],
    )


def family_unmet(
    checkpoint: Checkpoint,
    header: HeaderReader,
    num_layers: int,
    neutral: Mapping[str, Any],
    misfits: Callable[[], Sequence[str]],
) -> Sequence[str]:
    """Reasons in the order of `dense_unmet`, for a family with sizes of its own; misfits: asked for last."""
    family = header.architecture
    reasons = [*header.problems, *header.not_neutral(neutral)]
    scaling = checkpoint.metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling not in SCALING_TYPES:
        reasons.append(
            f"rope scaling {scaling!r} ({family}.rope.scaling.type) is not supported by family {family}; "
            f"supported are {', '.join(SCALING_TYPES)}"
        )
    if reasons:
        return reasons
    if num_layers > len(checkpoint.tensors):
        # a count that no file could fill must not be counted up to
        return [f"{family}.block_count={num_layers}, but there are {len(checkpoint.tensors)} tensors in all"]
    return misfits()


def bad_geometry(family: str, shape: DenseShape, metadata: Mapping[str, Any]) -> list[str]:
    """Sizes that are numbers but do not go together."""
    reasons = [*bad_vocabulary(metadata, shape.vocab_size), *bad_rotation(family, shape.rope, shape.head_dim)]
    if shape.num_heads % shape.num_kv_heads:
        reasons.append(
            f"{shape.num_heads} query heads ({family}.attention.head_count) cannot share {shape.num_kv_heads} key "
            f"heads ({family}.attention.head_count_kv) evenly"
        )
    value_dim = whole_number(metadata.get(f"{family}.attention.value_length", shape.head_dim))
    if value_dim != shape.head_dim:
        reasons.append(
            f"values of {value_dim} beside keys of {shape.head_dim} ({family}.attention.value_length, key_length) are "
            f"not supported by family {family}"
        )
    return reasons


def bad_vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> list[str]:
    """A tokenizer with more tokens than the embedding has rows; vocab_size 0: there is no embedding to compare with."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if is_list(tokens) else 0
    if num_tokens > vocab_size > 0:
        return [f"the tokenizer has {num_tokens} tokens and token_embd.weight only {vocab_size} rows"]
    return []


def bad_rotation(family: str, rope: RopeSpec, head_dim: int) -> list[str]:
    """A rotation that heads of that size cannot have."""
    reasons = []
    if rope.theta <= 1.0:
        reasons.append(f"{family}.rope.freq_base={rope.theta} must be above 1")
    if rope.dim % 2 or rope.dim > head_dim:
        reasons.append(
            f"{family}.rope.dimension_count={rope.dim} must be even and at most the head's {head_dim} values"
        )
    return reasons


# -- tensors ----------------------------------------------------------------------------------------------------------
def attention_matrices(shape: DenseShape) -> Shapes:
    """Matrices of an attention layer: queries, keys, values, output."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "attn_q": (query, shape.hidden),
        "attn_k": (key, shape.hidden),
        "attn_v": (key, shape.hidden),
        "attn_output": (shape.hidden, query),
    }


def gated_matrices(shape: DenseShape) -> Shapes:
    """Matrices of a gated feed-forward."""
    inner = (shape.intermediate, shape.hidden)
    return {"ffn_gate": inner, "ffn_up": inner, "ffn_down": (shape.hidden, shape.intermediate)}


def weights_of_all(shape: DenseShape, layer: Shapes) -> Shapes:
    """Embedding, last norm, and for every layer a weight of each name given, by full name."""
    weights: Shapes = {
        "token_embd.weight": (shape.vocab_size, shape.hidden),
        "output_norm.weight": (shape.hidden,),
    }
    for number in range(shape.num_layers):
        weights |= {f"blk.{number}.{name}.weight": rows for name, rows in layer.items()}
    return weights


def own_head(shape: DenseShape) -> Shapes:
    """The head of a checkpoint that does not use its embedding for it."""
    return {"output.weight": (shape.vocab_size, shape.hidden)}


@dataclass(frozen=True)
class Binder:
    """Hands a checkpoint's tensors to a backend. eps: of its norms; wide: see `ModelCapability.wide`."""

    checkpoint: Checkpoint
    ops: Ops
    eps: float
    wide: frozenset[str] = field(default=frozenset(), kw_only=True)

    def matrix(self, name: str) -> Weight:
        """A matrix by its full name."""
        return self._loaded(name, 2, self.ops.load_matrix)

    def _loaded(self, name: str, dimensions: int, load: Callable[..., Weight]) -> Weight:
        """By a backend that reads files itself, or else by what takes bytes."""
        tensor = self.checkpoint.tensors[name]
        shape = filled(tensor.shape, dimensions)
        load_stored, stored = getattr(self.ops, "load_stored", None), getattr(self.checkpoint, "stored", None)
        if load_stored and stored and (source := stored(name)):
            return load_stored(source, tensor.quant_type, shape)
        return load(self.checkpoint.data(name), tensor.quant_type, shape)

    def vector(self, name: str) -> Tensor:
        """A small tensor by its full name."""
        return self.ops.load_vector(self.checkpoint.values(name))

    def norm(self, name: str) -> Norm:
        """A norm by its name without `.weight`."""
        return Norm(self.vector(f"{name}.weight"), self.eps)

    def projection(self, name: str) -> Projection:
        """A matrix by its name without `.weight`, and its bias when the file has one."""
        bias = f"{name}.bias"
        return Projection(
            self.matrix(f"{name}.weight"),
            self.vector(bias) if bias in self.checkpoint.tensors else None,
            is_wide=self.is_wide(name),
        )

    def is_wide(self, name: str, stored: str | None = None) -> bool:
        """Whether rows that meet the matrix of this name without `.weight` keep 16 bits (`ModelCapability.wide`).

        Not where weights have fewer than four bits: those are off by more than eight bits of a row are, and more bits
        would cost a prompt a tenth (decision 32). stored: the name in the file, where it is another.
        """
        if name.rpartition(".")[2] not in self.wide:
            return False
        kind = BY_NAME[self.checkpoint.tensors[f"{stored or name}.weight"].quant_type]
        return 8 * kind.block_bytes >= WIDE_BITS * kind.block_elements

    def router(self, block: str) -> Projection:
        """What scores the experts of a block such as `blk.0.`: decoded where it is packed, as it is small.

        Rows meet a matrix of floats as they are, and what is rounded before a choice turns over ties.
        """
        tensor = self.checkpoint.tensors[f"{block}ffn_gate_inp.weight"]
        if tensor.quant_type in FLOAT_TYPES:
            return self.projection(f"{block}ffn_gate_inp")
        values = np.ascontiguousarray(self.checkpoint.values(f"{block}ffn_gate_inp.weight"))
        bias = f"{block}ffn_gate_inp.bias"
        return Projection(
            self.ops.load_matrix(values.view(np.uint8).reshape(-1), "F32", filled(tensor.shape, 2)),
            self.vector(bias) if bias in self.checkpoint.tensors else None,
        )

    def rows(self, name: str, *parts: npt.NDArray[np.integer]) -> tuple[Projection, ...]:
        """Some rows of a matrix, for each array of their numbers, by its name without `.weight`.

        A row is packed by itself in every encoding, so that nothing is decoded.
        """
        tensor = self.checkpoint.tensors[f"{name}.weight"]
        num_rows, width = filled(tensor.shape, 2)
        packed = self.checkpoint.data(f"{name}.weight").reshape(num_rows, -1)
        return tuple(
            Projection(
                self.ops.load_matrix(packed[part.reshape(-1)].reshape(-1), tensor.quant_type, (part.size, width)),
                is_wide=self.is_wide(name),
            )
            for part in parts
        )

    def head(self, embedding: Weight) -> Projection:
        """The head: the file's own, or the embedding where it is tied."""
        if "output.weight" in self.checkpoint.tensors:
            return self.projection("output")
        return Projection(embedding, is_wide=self.is_wide("output", stored="token_embd"))

    def experts(self, name: str) -> Weight:
        """Matrices of all experts by their name without `.weight`."""
        return self._loaded(f"{name}.weight", 3, self.ops.load_experts)

    def swiglu(self, block: str) -> "SwiGLU":
        """The feed-forward of a block such as `blk.0.`."""
        return SwiGLU(
            norm=self.norm(f"{block}ffn_norm"),
            gate=self.projection(f"{block}ffn_gate"),
            up=self.projection(f"{block}ffn_up"),
            down=self.projection(f"{block}ffn_down"),
        )


@dataclass(frozen=True)
class SwiGLU:
    """A feed-forward behind its norm (Shazeer 2020, arXiv 2002.05202)."""

    norm: Norm
    gate: Projection
    up: Projection
    down: Projection

    def add_to(self, x: Tensor, ops: Ops) -> Tensor:
        """x + down(silu(gate y) · up y) with y = norm(x): [tokens, hidden] → the same."""
        return ops.project_add(self._opened(x, ops), self.down, x)

    def of(self, x: Tensor, ops: Ops) -> Tensor:
        """down(silu(gate y) · up y) alone."""
        return ops.project(self._opened(x, ops), self.down)[0]

    def _opened(self, x: Tensor, ops: Ops) -> Tensor:
        gate, up = ops.project(x, self.gate, self.up, norm=self.norm)
        return ops.silu_mul(gate, up)
