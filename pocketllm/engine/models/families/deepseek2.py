"""deepseek2: DeepSeek V2 and V3: multi-head latent attention, and experts after the first layers.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434) and "DeepSeek-V3" (arXiv 2412.19437). V2 routes by softmax and judges
a group of experts by its best one; V3 routes by sigmoid with a bias that chooses and does not weigh, and judges by the
best two. The small V2 makes queries without a latent of their own. Neighboring values of a head rotate together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import KVCache, Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.models.blocks import (
    Binder,
    Shapes,
    SwiGLU,
    context_length,
    family_unmet,
    usable,
    vocab_rows,
)
from pocketllm.engine.models.contract import Checkpoint, LatentSpec, ModelCapability
from pocketllm.engine.models.header import HeaderReader
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

ARCHITECTURE = "deepseek2"

read_shape = read_latent_shape


def tensor_shapes(shape: LatentShape) -> tuple[Shapes, Shapes]:
    """Tensors by name with the shape they must have: those a checkpoint needs, and those it may have."""
    return decoder_shapes(shape, lambda number: {})


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attention: LatentAttention
    feed_forward: SwiGLU | Mixture


@dataclass(frozen=True)
class DeepSeek2Model:
    """Weights bound to one backend's operations; see `contract.Model`."""

    ops: Ops
    embedding: Weight
    layers: Sequence[Layer]
    output_norm: Norm
    head: Projection
    inv_freq: Tensor
    rope_magnitude: float
    kv_spec: LatentSpec
    vocab_size: int

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Final hidden states, normed, of `batch.logit_rows`: [rows, hidden]."""
        ops = self.ops
        x = ops.embed(self.embedding, batch.input_ids)
        angles = ops.rope_angles(self.inv_freq, batch.positions, self.rope_magnitude)
        for number, layer in enumerate(self.layers):
            attention = layer.attention
            found = attention.attend(number, attention.compress(x, ops), angles, batch, cache, ops)
            x = ops.project_add(found, attention.output, x)
            x = layer.feed_forward.add_to(x, ops)
        return ops.rms_norm(ops.take(x, batch.logit_rows), self.output_norm)

    def logits(self, hidden: Tensor) -> Any:
        """Logits as float32 numpy: [rows, vocab]."""
        return self.ops.to_numpy(self.ops.project(hidden, self.head)[0])


class DeepSeek2Family:
    """How a deepseek2 header is read and its model built."""

    architecture = ARCHITECTURE
    capability = ModelCapability(required_ops=LATENT_OPS)

    def kv_spec(self, metadata: Mapping[str, Any]) -> LatentSpec:
        return usable(read_latent_shape, metadata, ARCHITECTURE).kv

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return usable(context_length, metadata, ARCHITECTURE)

    def unmet(self, checkpoint: Checkpoint) -> Sequence[str]:
        header = HeaderReader(checkpoint.metadata, ARCHITECTURE)
        shape = read_latent_shape(header, vocab_rows(checkpoint))
        return family_unmet(
            checkpoint,
            header,
            shape.num_layers + shape.num_nextn,
            NEUTRAL,
            lambda: misfits(ARCHITECTURE, shape, checkpoint, lambda: tensor_shapes(shape)),
        )

    def load(self, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> DeepSeek2Model:
        read = partial(read_latent_shape, vocab_size=vocab_rows(checkpoint))
        shape = usable(read, checkpoint.metadata, ARCHITECTURE)
        bind = Binder(checkpoint, ops, shape.eps)
        embedding = bind.matrix("token_embd.weight")
        return DeepSeek2Model(
            ops=ops,
            embedding=embedding,
            layers=[bind_layer(bind, shape, number) for number in range(shape.num_layers)],
            output_norm=bind.norm("output_norm"),
            head=bind.head(embedding),
            inv_freq=ops.load_vector(inverse_frequencies(shape.rope)),
            rope_magnitude=shape.magnitude,
            kv_spec=shape.kv,
            vocab_size=shape.vocab_size,
        )


def bind_layer(bind: Binder, shape: LatentShape, number: int) -> Layer:
    """One block's weights."""
    block = f"blk.{number}."
    is_dense = number < shape.num_dense
    return Layer(
        attention=bind_attention(bind, block, shape),
        feed_forward=bind.swiglu(block) if is_dense else bind_mixture(bind, block, shape.mixture),
    )


FAMILY = DeepSeek2Family()
