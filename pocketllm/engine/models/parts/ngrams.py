"""Rows of a table by hashed n-grams, gated by each residual stream and mixed by a dilated convolution: keys `ple.*`."""

from dataclasses import dataclass, replace

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.indexed import NGrams
from pocketllm.engine.backends.api.ops import Ops, Projection, States, Tensor, Weight
from pocketllm.engine.models.blocks import Binder, Shapes
from pocketllm.engine.models.contract import Checkpoint, StateSpec
from pocketllm.engine.models.header import HeaderReader, is_list, short, whole_number
from pocketllm.engine.models.parts.gated_streams import StreamNorm, bind_stream_norm

NGRAM_OPS = frozenset({"ngram_embed", "gate_streams", "causal_conv", "add"})
TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True)
class NGramShape:
    """Of the one layer that n-grams are added to."""

    layer: int
    num_rows: int
    """Of the table; there may be more than the heads use."""
    width: int
    """Of a row."""
    taps: int
    ngrams: NGrams

    @property
    def length(self) -> int:
        """Tokens of the longest n-gram, and how far apart the convolution's taps are."""
        return len(self.ngrams.multipliers)

    def states(self, wide: int) -> tuple[StateSpec, StateSpec]:
        """What the convolution looks back on, and the n-grams. wide: all streams of a token."""
        return StateSpec(1, ((self.taps - 1) * self.length, wide)), StateSpec(1, (self.length - 1, 1))

    def tensors(self, wide: int, hidden: int) -> Shapes:
        """By full name."""
        block, read = f"blk.{self.layer}.ple_", len(self.ngrams.sizes) * self.width
        return {
            TABLE: (self.num_rows, self.width),
            f"{block}conv1d.weight": (wide, self.taps),
            f"{block}key.weight": (wide, read),
            f"{block}value.weight": (hidden, read),
            **{f"{block}norm_{part}.weight": (wide,) for part in ("conv", "key", "query")},
        }


def read_ngrams(header: HeaderReader) -> NGramShape | None:
    """None where no layer has n-grams; what cannot be read becomes one of the header's problems."""
    prefix = f"{header.architecture}.ple."
    layers = header.metadata.get(f"{prefix}layers", ())
    if is_list(layers) and not len(layers):
        return None
    if not is_list(layers) or len(layers) > 1 or whole_number(layers[0]) is None:
        header.problems.append(f"metadata key {prefix}layers is {short(layers)}: n-grams of one layer are supported")
        return None
    length, per_length = header.count("ple.ngram_size"), header.count("ple.heads_per_ngram")
    heads = (length - 1) * per_length
    sizes, offsets = numbers(header, "head_vocab_sizes", heads), numbers(header, "head_offsets", heads)
    ngrams = NGrams(
        multipliers=numbers(header, "layer_multipliers", length),
        heads_per_length=per_length,
        sizes=sizes,
        offsets=offsets,
        end_token=header.count_or_none("ple.eos_token_id"),
    )
    return NGramShape(
        layer=int(layers[0]),
        num_rows=max((offset + size for offset, size in zip(offsets, sizes, strict=False)), default=1),
        width=header.count("embedding_length_per_layer_input"),
        taps=header.count("ple.conv_kernel"),
        ngrams=ngrams,
    )


def numbers(header: HeaderReader, name: str, count: int) -> list[int]:
    """A list of that many whole numbers."""
    key = f"{header.architecture}.ple.{name}"
    value = header.metadata.get(key, ())
    if not is_list(value) or len(value) != count or any((whole_number(one) or 0) < 0 for one in value):
        header.problems.append(f"metadata key {key} is {short(value)}: it must be {count} whole numbers")
        return []
    return [int(one) for one in value]


def with_rows_of(own: NGramShape | None, checkpoint: Checkpoint) -> NGramShape | None:
    """The same with the rows that the table has, where those are enough."""
    table = checkpoint.tensors.get(TABLE)
    if own is None or table is None or len(table.shape) != 2:
        return own
    return replace(own, num_rows=max(own.num_rows, int(table.shape[0])))


@dataclass(frozen=True)
class NGramLayer:
    """What is added to the streams before a layer: v + silu(conv(norm v)), with v a value that each stream gates."""

    table: Weight
    ngrams: NGrams
    key: Projection
    value: Projection
    key_norm: StreamNorm
    query_norm: StreamNorm
    conv_norm: StreamNorm
    kernel: Tensor

    def add_to(self, streams: Tensor, ops: Ops, batch: ForwardBatch, before: States, tokens: States) -> Tensor:
        """before and tokens: as `NGramShape.states` has them."""
        rows = ops.ngram_embed(self.table, self.ngrams, tokens, 0, batch)
        key, value = ops.project(rows, self.key, self.value)
        gated = ops.gate_streams(self.key_norm.of(key, ops), self.query_norm.of(streams, ops), value)
        normed, apart = self.conv_norm.of(gated, ops), len(self.ngrams.multipliers)
        mixed = ops.causal_conv(normed, self.kernel, before, 0, batch, silu=True, dilation=apart)
        return ops.add(streams, ops.add(gated, mixed))


def bind_ngrams(bind: Binder, own: NGramShape, hidden: int) -> NGramLayer:
    """The weights of the layer that n-grams are added to."""
    block = f"blk.{own.layer}.ple_"
    key_norm, query_norm, conv_norm = (
        bind_stream_norm(bind, f"{block}norm_{part}", hidden) for part in ("key", "query", "conv")
    )
    return NGramLayer(
        table=bind.matrix(TABLE),
        ngrams=own.ngrams,
        key=bind.projection(f"{block}key"),
        value=bind.projection(f"{block}value"),
        key_norm=key_norm,
        query_norm=query_norm,
        conv_norm=conv_norm,
        kernel=bind.vector(f"{block}conv1d.weight"),
    )
