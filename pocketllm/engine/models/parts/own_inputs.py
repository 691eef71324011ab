"""An input of its own for every layer: a row of a table by the token, and a projection of the embedding (Gemma 4)."""

from dataclasses import dataclass

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, Tensor, Weight
from pocketllm.engine.models.blocks import Binder, Shapes


def own_input_shapes(num_layers: int, width: int, hidden: int, vocab_size: int) -> tuple[Shapes, Shapes]:
    """Tensors by full name, and those of each layer by name without `.weight`; width 0: there are none."""
    if not width:
        return {}, {}
    whole = num_layers * width
    return {
        "per_layer_token_embd.weight": (vocab_size, whole),
        "per_layer_model_proj.weight": (whole, hidden),
        "per_layer_proj_norm.weight": (width,),
    }, {"inp_gate": (width, hidden), "proj": (hidden, width), "post_norm": (hidden,)}


@dataclass(frozen=True)
class Inputs:
    """What makes the layers' own inputs."""

    table: Weight
    projection: Projection
    norm: Norm
    width: int

    def of(self, x: Tensor, ops: Ops, batch: ForwardBatch) -> Tensor:
        """Every layer's own input, side by side: [tokens, layers * width]. x: the embedding."""
        told = ops.embed(self.table, batch.input_ids, scale=(self.width / 2) ** 0.5)
        return ops.add(ops.rms_norm(ops.project(x, self.projection)[0], self.norm), told)


@dataclass(frozen=True)
class OwnInput:
    """What a layer does with the input that is its own."""

    gate: Projection
    up: Projection
    norm: Norm
    first: int
    """Where it begins among those of all layers, and where it ends."""
    last: int

    def add_to(self, x: Tensor, ops: Ops, inputs: Tensor) -> Tensor:
        """x + norm(up(gelu(gate x) · own input)): [tokens, hidden] → the same; inputs: as `Inputs.of` gave them."""
        mine = ops.columns(inputs, self.first, self.last)
        opened = ops.gelu_mul(ops.project(x, self.gate)[0], mine)
        return ops.add(x, ops.rms_norm(ops.project(opened, self.up)[0], self.norm))


def bind_inputs(bind: Binder, width: int, hidden: int) -> Inputs:
    """What makes the layers' own inputs.

    The projection over √hidden, normed, and the table's row times √width are added and divided by √2: the norm's
    epsilon takes the first factor, its weight and the table's scale the last.
    """
    weight = bind.checkpoint.values("per_layer_proj_norm.weight") * np.float32(0.5**0.5)
    return Inputs(
        table=bind.matrix("per_layer_token_embd.weight"),
        projection=bind.projection("per_layer_model_proj"),
        norm=Norm(bind.ops.load_vector(weight), bind.eps * hidden),
        width=width,
    )


def bind_own_input(bind: Binder, number: int, width: int) -> OwnInput:
    """What a layer does with its own input."""
    gate, up = (bind.projection(f"blk.{number}.{name}") for name in ("inp_gate", "proj"))
    return OwnInput(gate, up, bind.norm(f"blk.{number}.post_norm"), number * width, (number + 1) * width)
