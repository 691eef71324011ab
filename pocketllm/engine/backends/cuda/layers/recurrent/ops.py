"""Operations over states in slots, and rotations of rows."""

import torch
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch, Int32Array
from pocketllm.engine.backends.api.recurrent import DeltaNet, KimiDelta
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.cuda.layers.operands import Rows, written
from pocketllm.engine.backends.cuda.layers.operations import Operations
from pocketllm.engine.backends.cuda.layers.recurrent.kernels.rotations import hadamard_kernel
from pocketllm.engine.backends.cuda.layers.recurrent.kimi import kimi_delta_rule
from pocketllm.engine.backends.cuda.layers.recurrent.layers import States, convolve, delta_rule, new_states


class RecurrentOps(Operations):
    """Short convolutions and gated delta rules; see `api.ops.Ops`."""

    def new_states(self, num_layers: int, conv: tuple[int, int], delta: tuple[int, int, int], num_slots: int) -> States:
        return new_states(num_layers, conv, delta, num_slots, self._device)

    def copy_states(self, states: States, sources: Int32Array, targets: Int32Array) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            states.copy(source, target)

    def causal_conv(
        self,
        x: Rows,
        kernel: Tensor,
        states: States,
        layer: int,
        batch: ForwardBatch,
        silu: bool,
        dilation: int = 1,
    ) -> Tensor:
        return convolve(written(x), kernel, states.conv[layer], self._of(batch), silu, dilation)

    def gated_delta(
        self, mixed: Rows, step: Rows, share: Rows, net: DeltaNet, states: States, layer: int, batch: ForwardBatch
    ) -> Tensor:
        rows = written(mixed).contiguous()
        return delta_rule(rows, written(step), written(share), net, states.delta[layer], self._of(batch))

    def kimi_delta(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        step: Rows,
        share: Rows,
        net: KimiDelta,
        states: States,
        layer: int,
        batch: ForwardBatch,
    ) -> Tensor:
        own_q, own_k, own_v = (written(part).contiguous() for part in (q, k, v))
        kept, own = states.delta[layer], self._of(batch)
        return kimi_delta_rule(own_q, own_k, own_v, written(step), written(share), net, kept, own)

    def hadamard(self, x: Rows, rotation: Hadamard, inverse: bool = False) -> Tensor:
        rows = written(x)
        count, width = rows.shape
        out = torch.empty(count, width, dtype=torch.float32, device=rows.device)
        hadamard_kernel[(count, width // rotation.block)](
            rows, rotation.signs, out, rows.stride(0), width,
            BLOCK=rotation.block, LEVELS=rotation.block.bit_length() - 1, IS_INVERSE=inverse, num_warps=4,
        )  # fmt: skip
        return out
