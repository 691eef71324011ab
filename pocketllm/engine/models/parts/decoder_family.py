"""The frame of a family: what `contract.ModelFamily` asks, from functions that read sizes, name tensors and bind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.models.blocks import (
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    context_length,
    dense_unmet,
    read_dense_shape,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import CacheSpec, Checkpoint, Model, ModelCapability
from pocketllm.engine.models.header import HeaderReader

Sizes = TypeVar("Sizes")


@dataclass(frozen=True)
class DecoderFamily(Generic[Sizes]):
    """A family over a plain decoder's sizes and whatever it has beside them; see `contract.ModelFamily`."""

    architecture: str
    capability: ModelCapability
    neutral: Mapping[str, Any]
    """As `HeaderReader.not_neutral` takes it."""
    read_shape: Callable[[HeaderReader, int], Sizes]
    """Sizes from a header and the number of the vocabulary's rows."""
    dense: Callable[[Sizes], DenseShape]
    cache: Callable[[Sizes], CacheSpec]
    tensor_shapes: Callable[[Sizes], tuple[Shapes, Shapes]]
    """Tensors that a checkpoint needs, and those it may have."""
    bind: Callable[[Binder, Sizes], Model]

    def kv_spec(self, metadata: Mapping[str, Any]) -> CacheSpec:
        return self.cache(self._usable_shape(metadata, 0))

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, self.architecture)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, self.architecture)
        shape = self.read_shape(header, vocab_rows(checkpoint))
        return dense_unmet(checkpoint, header, self.dense(shape), self.neutral, lambda: self.tensor_shapes(shape))

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> Model:
        shape = self._usable_shape(checkpoint.metadata, vocab_rows(checkpoint))
        return self.bind(Binder(checkpoint, ops, self.dense(shape).eps), shape)

    def _usable_shape(self, metadata: Mapping[str, Any], vocab_size: int) -> Sizes:
        """GGUFError where the header cannot be read."""
        return usable(lambda header: self.read_shape(header, vocab_size), metadata, self.architecture)


def plain_family(
    architecture: str,
    required_ops: frozenset[str],
    tensor_shapes: Callable[[DenseShape], tuple[Shapes, Shapes]],
    bind: Callable[[Binder, DenseShape], Model],
    activation_bits: int = 16,
) -> DecoderFamily[DenseShape]:
    """A family that has nothing beside a plain decoder's sizes; activation_bits: as `ModelCapability` has it."""
    return DecoderFamily(
        architecture=architecture,
        capability=ModelCapability(required_ops=required_ops, activation_bits=activation_bits),
        neutral=NEUTRAL_KEYS,
        read_shape=read_dense_shape,
        dense=lambda shape: shape,
        cache=lambda shape: shape.kv,
        tensor_shapes=tensor_shapes,
        bind=bind,
    )
