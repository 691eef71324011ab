"""minimax-m2: grouped attention whose queries and keys are normed as whole rows, and experts in every layer.

MiniMax 2025, the configuration and model card of MiniMax-M2. Experts are chosen by sigmoid with a bias that does not
weigh, and their weights normalized; no expert is shared. The two halves of a head's rotated values rotate together.
"""

from dataclasses import dataclass

from pocketllm.engine.models.blocks import (
    DENSE_OPS,
    NEUTRAL_KEYS,
    Binder,
    DenseShape,
    Shapes,
    attention_matrices,
    own_head,
    read_dense_shape,
    weights_of_all,
)
from pocketllm.engine.models.contract import ModelCapability
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.attention.normed_heads import NormedHeadsModel, bind_normed_heads
from pocketllm.engine.models.parts.decoder_family import DecoderFamily
from pocketllm.engine.models.parts.mixtures.experts import (
    MIXTURE_OPS,
    MixtureShape,
    bind_mixture,
    mixture_shapes,
    read_mixture,
)

ARCHITECTURE = "minimax-m2"
NEUTRAL = {key: value for key, value in NEUTRAL_KEYS.items() if key != "expert_count"} | {
    "leading_dense_block_count": 0,
}


@dataclass(frozen=True)
class MiniMaxShape:
    """A plain decoder's sizes, its feed-forward's apart, and those of its experts."""

    dense: DenseShape
    mixture: MixtureShape


def read_shape(header: HeaderReader, vocab_size: int = 0) -> MiniMaxShape:
    """Sizes from the header; what cannot be read becomes one of the header's problems."""
    dense = read_dense_shape(header, vocab_size)
    return MiniMaxShape(dense, read_mixture(header, dense.hidden, normalized=True))


def tensor_shapes(shape: MiniMaxShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    dense = shape.dense
    matrices = attention_matrices(dense)
    norms: Shapes = {f"{name}_norm": matrices[name][:1] for name in ("attn_q", "attn_k")}
    needed = weights_of_all(dense, matrices | norms | {"attn_norm": (dense.hidden,)})
    optional = own_head(dense)
    experts, chosen = mixture_shapes(shape.mixture)
    for number in range(dense.num_layers):
        needed |= {f"blk.{number}.{name}": sizes for name, sizes in experts.items()}
        optional |= {f"blk.{number}.{name}": sizes for name, sizes in chosen.items()}
    return needed, optional


def bind_model(bind: Binder, shape: MiniMaxShape) -> NormedHeadsModel:
    """All weights."""
    return bind_normed_heads(bind, shape.dense, lambda bind, block: bind_mixture(bind, block, shape.mixture))


FAMILY = DecoderFamily(
    architecture=ARCHITECTURE,
    capability=ModelCapability(required_ops=DENSE_OPS | MIXTURE_OPS),
    neutral=NEUTRAL,
    read_shape=read_shape,
    dense=lambda shape: shape.dense,
    cache=lambda shape: shape.dense.kv,
    tensor_shapes=tensor_shapes,
    bind=bind_model,
)
